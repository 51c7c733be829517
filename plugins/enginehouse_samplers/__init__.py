"""Sampler plugins: DRY, dynamic temperature, typical-p, XTC, top-n-sigma, Mirostat, adaptive-p. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse_samplers.adaptive_p import AdaptivePSampler
from enginehouse_samplers.dry import DrySampler
from enginehouse_samplers.dynatemp import DynatempSampler
from enginehouse_samplers.mirostat import MirostatSampler
from enginehouse_samplers.top_n_sigma import TopNSigmaSampler
from enginehouse_samplers.typical_p import TypicalSampler
from enginehouse_samplers.xtc import XtcSampler

__all__ = ["register_samplers"]


@hookimpl
def register_samplers(register: Callable[[SamplerPlugin], None]) -> None:
    """Register the samplers; each is off until a request sets its field."""
    register(DrySampler())
    register(DynatempSampler())
    register(TypicalSampler())
    register(XtcSampler())
    register(TopNSigmaSampler())
    register(MirostatSampler())
    register(AdaptivePSampler())
