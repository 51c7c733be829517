"""Sampler plugins: locally typical sampling, top-n-sigma and XTC. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.sampler import SamplerPlugin
from enginehouse_samplers.top_n_sigma import TopNSigmaSampler
from enginehouse_samplers.typical_p import TypicalSampler
from enginehouse_samplers.xtc import XtcSampler

__all__ = ["register_samplers"]


@hookimpl
def register_samplers(register: Callable[[SamplerPlugin], None]) -> None:
    """Hand over the three samplers; each is off until a request sets its field."""
    register(TypicalSampler())
    register(TopNSigmaSampler())
    register(XtcSampler())
