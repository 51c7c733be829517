"""Embeddings, rerank, score and classify as a surface. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.surface import Surface

__all__ = ["register_surfaces"]


@hookimpl
def register_surfaces(register: Callable[[Surface], None]) -> None:
    """Register the surface ``pooling``."""
    from enginehouse_pooling.surface import PoolingSurface

    register(PoolingSurface())
