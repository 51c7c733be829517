"""Backend ``mlx``: language models through mlx-lm. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse_mlx.backend import MlxBackend

__all__ = ["register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Register the ``mlx`` backend."""
    register(MlxBackend())
