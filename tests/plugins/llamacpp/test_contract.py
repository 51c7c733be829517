"""The llama.cpp runner keeps the Runner contract on both local models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.backend import Runner
from enginehouse.testing.runner_contract import RunnerContract

pytestmark = pytest.mark.llamacpp


class TestSmolLM2(RunnerContract):
    """Batch-invariant, so all rows must be equal to the last bit, whatever was moved in between."""

    num_random_steps = 120

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, smollm_path: Path, open_runner: Callable[..., Runner]) -> Callable[[], Runner]:
        return lambda: open_runner(
            smollm_path, context=192, cache_tokens=256, slots=4, max_sequences=8, n_batch=64, threads=1
        )

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
    def make_runner(cls, gemma_path: Path, open_runner: Callable[..., Runner]) -> Callable[[], Runner]:
        return lambda: open_runner(
            gemma_path, context=192, cache_tokens=256, slots=4, max_sequences=8, n_batch=64, threads=1
        )


@pytest.mark.slow
class TestGemma3WithWindowOnly(TestGemma3):
    """Sliding-window layers that keep only their window."""

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, gemma_path: Path, open_runner: Callable[..., Runner]) -> Callable[[], Runner]:
        return lambda: open_runner(
            gemma_path,
            context=192,
            cache_tokens=256,
            slots=4,
            max_sequences=8,
            n_batch=64,
            threads=1,
            swa_full=False,
        )
