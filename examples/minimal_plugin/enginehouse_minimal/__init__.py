"""The plugin ``minimal``. Hook implementations only: every start of the server imports this."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.backend import Backend
from enginehouse.sampler import SamplerPlugin
from enginehouse_minimal.backend import MinimalBackend
from enginehouse_minimal.sampler import CutoffSampler

__all__ = ["register_backends", "register_samplers"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Hand over the backend."""
    register(MinimalBackend())


@hookimpl
def register_samplers(register: Callable[[SamplerPlugin], None]) -> None:
    """Hand over the sampler."""
    register(CutoffSampler())
