"""Model source ``starter``: a small chat model in a package. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import ModelSource
from enginehouse_starter.source import find_starter_model

__all__ = ["register_model_sources"]


@hookimpl
def register_model_sources(register: Callable[[str, Callable[[], ModelSource | None]], None]) -> None:
    """Register the packaged model as ``starter``."""
    register("starter", find_starter_model)
