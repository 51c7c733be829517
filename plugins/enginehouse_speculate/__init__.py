"""Drafters: prompt lookup, predicted answers, a smaller model, a draft head, the first layers of the model itself."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.drafter import Drafter
from enginehouse_speculate.draft_model import DraftModelDrafter
from enginehouse_speculate.head import HeadDrafter
from enginehouse_speculate.layers import LayersDrafter
from enginehouse_speculate.prediction import PredictionDrafter
from enginehouse_speculate.prompt_lookup import PromptLookupDrafter

__all__ = ["register_drafters"]


@hookimpl
def register_drafters(register: Callable[[Drafter], None]) -> None:
    """Register the drafters; a model uses those named in its settings."""
    register(PredictionDrafter())
    register(PromptLookupDrafter())
    register(DraftModelDrafter())
    register(LayersDrafter())
    register(HeadDrafter())
