"""The plugin ``minimal``. Hook implementations only: every start of the server imports this."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.backend import Backend
from enginehouse.contract.router import Router
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse_minimal.backend import MinimalBackend
from enginehouse_minimal.router import LengthRouter
from enginehouse_minimal.sampler import CutoffSampler

__all__ = ["register_backends", "register_routers", "register_samplers"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Hand over the backend."""
    register(MinimalBackend())


@hookimpl
def register_routers(register: Callable[[Router], None]) -> None:
    """Hand over the router."""
    register(LengthRouter())


@hookimpl
def register_samplers(register: Callable[[SamplerPlugin], None]) -> None:
    """Hand over the sampler."""
    register(CutoffSampler())
