"""Embeddings, rerank, score and classify as a surface. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.surface import Surface
from enginehouse_pooling.surface import PoolingSurface

__all__ = ["register_surfaces"]


@hookimpl
def register_surfaces(register: Callable[[Surface], None]) -> None:
    """Register the surface ``pooling``."""
    register(PoolingSurface())
