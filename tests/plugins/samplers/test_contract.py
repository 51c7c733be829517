"""Every sampler keeps the contract of samplers."""

from __future__ import annotations

from typing import ClassVar

import pytest

from enginehouse.contract.sampler import SamplerPlugin
from enginehouse_samplers.adaptive_p import AdaptivePSampler
from enginehouse_samplers.dry import DrySampler
from enginehouse_samplers.dynatemp import DynatempSampler
from enginehouse_samplers.mirostat import MirostatSampler
from enginehouse_samplers.top_n_sigma import TopNSigmaSampler
from enginehouse_samplers.typical_p import TypicalSampler
from enginehouse_samplers.xtc import XtcSampler
from enginehouse_testkit.sampler_contract import SamplerContract


class Contract(SamplerContract):
    plugin: ClassVar[type[SamplerPlugin]]

    @pytest.fixture(scope="class")
    @classmethod
    def sampler(cls) -> SamplerPlugin:
        return cls.plugin()


class TestAdaptiveP(Contract):
    plugin = AdaptivePSampler
    active = ({"adaptive_target": 0.3, "min_p": 0.02}, {"adaptive_target": 0.0, "adaptive_decay": 0.5})


class TestDry(Contract):
    plugin = DrySampler
    active = (
        {"dry_multiplier": 0.9, "dry_allowed_length": 1, "dry_sequence_breakers": ["a"], "temperature": 0.8},
        {"dry_multiplier": 3.0, "dry_allowed_length": 1},
    )


class TestDynatemp(Contract):
    plugin = DynatempSampler
    active = ({"dynatemp_range": 0.7}, {"dynatemp_range": 0.4, "top_k": 5})


class TestMirostat(Contract):
    plugin = MirostatSampler
    active = ({"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3}, {"mirostat": 2, "temperature": 1.5})


class TestMirostatOne(Contract):
    plugin = MirostatSampler
    active = ({"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3}, {"mirostat": 1, "temperature": 1.5})


class TestTopNSigma(Contract):
    plugin = TopNSigmaSampler
    active = ({"top_n_sigma": 1.0, "temperature": 3.0},)


class TestTypical(Contract):
    plugin = TypicalSampler
    active = ({"typical_p": 0.5},)


class TestXtc(Contract):
    plugin = XtcSampler
    active = ({"xtc_probability": 0.5, "xtc_threshold": 0.05}, {"xtc_probability": 1.0, "top_k": 4})


class TestXtcWithValuesThatTheSuiteFinds(Contract):
    """Authors need not list any."""

    plugin = XtcSampler
