"""The llama.cpp runner keeps the Runner contract on both local models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.backend import Runner
from enginehouse.testing.runner_contract import RunnerContract

pytestmark = pytest.mark.llamacpp


class TestSmolLM2(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, smollm_path: Path, open_runner: Callable[..., Runner]) -> Callable[[], Runner]:
        return lambda: open_runner(smollm_path, context=192, cache_tokens=256, slots=4, max_sequences=8, threads=1)
