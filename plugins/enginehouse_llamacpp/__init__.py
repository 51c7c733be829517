"""Backend ``llamacpp``: GGUF models through llama.cpp's C API. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse_llamacpp.backend import LlamaCppBackend

__all__ = ["register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Register the ``llamacpp`` backend."""
    register(LlamaCppBackend())
