"""Backend ``hf``: causal language models through Hugging Face transformers. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse_hf.backend import HfBackend

__all__ = ["register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Register the ``hf`` backend."""
    register(HfBackend())
