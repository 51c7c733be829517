"""Saved sequences: equal logits in another runner, other data refused, and prompts found after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.contract.reopened_states import ReopenedStatesContract

pytestmark = pytest.mark.hf


class TestStates(ReopenedStatesContract):
    backend = HfBackend()
    options = HfOptions(device="cpu", context=64, slots=2, threads=1)

    @pytest.fixture
    def folder(self, tiny_model: Callable[[str], Path]) -> Callable[[str], Path]:
        return tiny_model


def test_models_whose_weights_are_drawn_keep_no_states(tiny_model: Callable[[str], Path]) -> None:
    """The next process draws others."""
    path = tiny_model("llama")
    options = HfOptions(device="cpu", context=64, slots=2, threads=1, random_weights=True)
    runner = HfBackend().open(ModelSource(str(path), path), options, lambda _share, _what: None)

    assert not runner.capabilities.states
