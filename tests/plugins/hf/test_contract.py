"""The hf backend keeps the contracts of backends, runners and engines, on models with and without sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.contract.model_folder import ModelFolderContract
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.runner_contract import RunnerContract

pytestmark = pytest.mark.hf


class _TinyModelContract(RunnerContract):
    """A cache of four contexts for eight sequences, so that it can be full; the window of 8 is passed often."""

    architecture: str
    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: Callable[[str], Path]) -> ModelUnderTest:
        path = tiny_model(cls.architecture)
        options = HfOptions(device="cpu", context=64, slots=4, max_batch_tokens=128, threads=1)
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


class TestLlama(_TinyModelContract, BackendContract, ModelFolderContract, EngineContract):
    architecture = "llama"
    libraries = ("torch", "transformers")
    label = "transformers "
    own_code = {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"},
    }


class TestGemma3(_TinyModelContract):
    architecture = "gemma3"


class TestGemma2(_TinyModelContract):
    architecture = "gemma2"


class TestQwen3(_TinyModelContract):
    architecture = "qwen3"


class TestHybrid(RunnerContract):
    """Gated delta nets beside attention: a sequence has a state, which cannot be cut."""

    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, random_model: Callable[[str], Path]) -> ModelUnderTest:
        path = random_model("qwen3_5_text")
        options = HfOptions(device="cpu", context=64, slots=4, max_batch_tokens=128, threads=1)
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


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
        options = HfOptions(device="cpu", context=64, slots=4, max_batch_tokens=128, threads=1)
        return ModelUnderTest(backend=HfBackend(), source=source, options=options)
