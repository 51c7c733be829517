"""The llama.cpp backend keeps the contracts of backends, runners and engines, on both local models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.runner_contract import RunnerContract

from .hybrid_models import write_hybrid

pytestmark = pytest.mark.llamacpp


def small(path: Path, **options: Any) -> ModelUnderTest:
    """A cache that the suites can fill."""
    settings = LlamaCppOptions(
        **{"context": 192, "cache_tokens": 256, "slots": 4, "max_sequences": 8, "n_batch": 64, "threads": 1, **options}
    )
    return ModelUnderTest(backend=LlamaCppBackend(), source=ModelSource(str(path), path), options=settings)


class TestSmolLM2(BackendContract, RunnerContract, EngineContract):
    """Batch-invariant, so all rows must be equal to the last bit, whatever was moved in between."""

    num_random_steps = 120

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, smollm_path: Path) -> ModelUnderTest:
        return small(smollm_path)

    def test_rows_are_equal_to_the_last_bit(self, runner: Runner) -> None:
        """The claim under which the rest of this class compares exactly."""
        assert runner.capabilities.batch_invariant


class TestGemma3(RunnerContract):
    """Q5_0 and Q8_0 weights: llama.cpp has other kernels for one row than for many.

    The rounding differences grow to 1.4 (measured) on logits between -20 and 20; wrong positions give more than 5.
    """

    max_logit_difference = 2.5
    num_random_steps = 20

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, gemma_path: Path) -> ModelUnderTest:
        return small(gemma_path)


@pytest.mark.slow
class TestGemma3WithWindowOnly(TestGemma3):
    """Sliding-window layers that keep only their window."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, gemma_path: Path) -> ModelUnderTest:
        return small(gemma_path, swa_full=False)


class _Hybrid(RunnerContract):
    """Sequences with a state, which go back to checkpoints."""

    kind: ClassVar[str]
    options: ClassVar[dict[str, int]] = {}
    adds_space = True

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        return small(write_hybrid(tmp_path_factory.mktemp("hybrid"), cls.kind), **cls.options)


class TestShortConvolutions(_Hybrid):
    kind = "lfm2"


@pytest.mark.slow
class TestShortConvolutionsAtLength(_Hybrid, EngineContract):
    kind = "lfm2"
    num_random_steps = 200


class TestGatedDeltaNet(_Hybrid):
    """With long passes in many parts, after each of which one may be aborted."""

    kind = "qwen35"
    options = {"context": 512, "cache_tokens": 1536, "n_batch": 512, "n_ubatch": 32}


@pytest.mark.slow
class TestMamba(_Hybrid):
    kind = "mamba"
