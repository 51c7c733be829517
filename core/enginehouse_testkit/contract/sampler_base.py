"""Shared base of the sampler contract tests: requests that enable a sampler, and sampling through core."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse_testkit.contract.form import FormContract, loader_problem

__all__ = ["VOCAB_SIZE", "SamplerContractBase", "rows", "tries_of"]

VOCAB_SIZE = 60
_NUM_FRESH = 12
_TEXTS = tuple(chr(60 + token_id).encode() for token_id in range(VOCAB_SIZE))
_VALUES: tuple[Any, ...] = (0.5, 0.1, 0.9, 0.01, 1, 2, 0, 5, 1.5, -1, True, False, ["A", "H", "RS"], "A")


class SamplerContractBase(FormContract):
    """Fixtures and settings.

    The fixture ``sampler`` is provided by the author.

    Attributes:
        active: request fields that enable the sampler, including fields of core that affect it.
    """

    active: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, sampler: SamplerPlugin) -> str:
        """Reason for which the loader refuses the sampler."""
        return loader_problem("samplers", sampler)

    @pytest.fixture(scope="class")
    @classmethod
    def requests(cls, sampler: SamplerPlugin) -> list[SamplingParams]:
        """Sampling parameters of the requests that enable it."""
        fields = [attribute.name for attribute in attrs.fields(sampler.request_fields)]
        found = list(cls.active) or tries_of(sampler)
        assert found, f"no value of {', '.join(fields)} that was tried switches it on; list some in ``active``"
        return [
            SamplingParams(
                **{"seed": 9, **{name: value for name, value in request.items() if name not in fields}},
                extensions={sampler.name: {name: value for name, value in request.items() if name in fields}},
            )
            for request in found
        ]

    def following(self, sampler: SamplerPlugin, params: SamplingParams, choice: int = 0) -> SequenceSampler:
        """Return core's sampler of one sequence with the plugin's step in it."""
        return SequenceSampler(
            params,
            choice=choice,
            vocab_size=VOCAB_SIZE,
            prompt_token_ids=[1, 2, 3, 1, 2],
            steps=build_steps(params, {sampler.name: sampler}),
            token_bytes=_TEXTS,
        )

    def drawn(self, sampler: SamplerPlugin, params: SamplingParams, num_tokens: int = 30, choice: int = 0) -> list[int]:
        """Sample tokens one after another."""
        sequence, found = self.following(sampler, params, choice), []
        for position, row in enumerate(rows(num_tokens)):
            found.append(sequence.sample(row, position).token_id)
            sequence.accept(found[-1])
        return found


def rows(num_rows: int, seed: int = 3) -> NDArray[np.float32]:
    """Return new logits like a model's, (num_rows, vocab_size) float32. All rows from ``_NUM_FRESH`` on are equal."""
    found = np.random.default_rng(seed).normal(0, 2, (num_rows, VOCAB_SIZE)).astype(np.float32)
    found[_NUM_FRESH:] = found[_NUM_FRESH - 1 : _NUM_FRESH]
    return found


def tries_of(sampler: SamplerPlugin) -> list[dict[str, Any]]:
    """Return up to three requests that enable a sampler: with one field, else with two."""
    names = [attribute.name for attribute in attrs.fields(sampler.request_fields)]
    found: list[dict[str, Any]] = []
    for count in (1, 2):
        for chosen in itertools.combinations(names, count):
            for values in itertools.product(_VALUES, repeat=count):
                request = dict(zip(chosen, values, strict=True))
                if _is_on(sampler, request):
                    found.append(request)
                    break
        if found:
            break
    return found[:3]


def _is_on(sampler: SamplerPlugin, request: dict[str, Any]) -> bool:
    try:
        return bool(build_steps(SamplingParams(extensions={sampler.name: request}), {sampler.name: sampler}))
    except Exception:  # noqa: BLE001 - the plugin refuses the value; it may raise any exception
        return False
