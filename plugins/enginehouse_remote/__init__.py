"""Backend ``remote``: models on any OpenAI-compatible server. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse_remote.backend import RemoteBackend

__all__ = ["register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Register the ``remote`` backend."""
    register(RemoteBackend())
