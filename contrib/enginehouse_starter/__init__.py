"""Model sources ``starter`` and ``starter-embeddings``: small models in packages. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import ModelSource
from enginehouse_starter.source import find_starter_embeddings, find_starter_model

__all__ = ["register_model_sources"]


@hookimpl
def register_model_sources(register: Callable[[str, Callable[[], ModelSource | None]], None]) -> None:
    """Register the packaged models: for chat as ``starter``, for embeddings as ``starter-embeddings``."""
    register("starter", find_starter_model)
    register("starter-embeddings", find_starter_embeddings)
