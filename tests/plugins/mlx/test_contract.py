"""The mlx backend keeps the contracts of backends, runners and engines, on models with and without sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.contract.model_folder import ModelFolderContract
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.runner_contract import RunnerContract

pytestmark = pytest.mark.mlx


class _TinyModelContract(RunnerContract):
    """A cache of four contexts for eight sequences, so that it can be full; the window of 8 is passed often."""

    architecture: str
    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: Callable[[str], Path]) -> ModelUnderTest:
        path = tiny_model(cls.architecture)
        options = MlxOptions(context=64, slots=4, max_batch_tokens=128)
        return ModelUnderTest(backend=MlxBackend(), source=ModelSource(str(path), path), options=options)


class TestLlama(_TinyModelContract, BackendContract, ModelFolderContract, EngineContract):
    architecture = "llama"
    libraries = ("mlx_lm",)
    label = "mlx-lm "
    own_code = {"model_file": "theirs.py"}


class TestGemma3(_TinyModelContract):
    architecture = "gemma3"


class TestQwen3(_TinyModelContract):
    architecture = "qwen3"


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSmolLM2(RunnerContract, EngineContract):
    """A real model with thirty layers, in float32."""

    max_logit_difference = 0.01
    num_random_steps = 10

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, smollm2_folder: Path) -> ModelUnderTest:
        source = ModelSource(str(smollm2_folder), smollm2_folder)
        options = MlxOptions(context=64, slots=4, max_batch_tokens=128)
        return ModelUnderTest(backend=MlxBackend(), source=source, options=options)
