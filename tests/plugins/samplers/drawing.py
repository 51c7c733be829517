"""Draws tokens with the real sampler from the fields of a request, as core would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler


def params_of(fields: Mapping[str, Any], plugins: Mapping[str, SamplerPlugin], **more: Any) -> SamplingParams:
    """Core's fields as they are, those of plugins by plugin."""
    extensions: dict[str, dict[str, Any]] = {}
    core = dict(more)
    owners = {a.name: name for name, plugin in plugins.items() for a in attrs.fields(plugin.request_fields)}
    for field, value in fields.items():
        if field in owners:
            extensions.setdefault(owners[field], {})[field] = value
        else:
            core[field] = value
    return SamplingParams(extensions=extensions, **core)


def sampler_for(
    fields: Mapping[str, Any],
    samplers: Mapping[str, SamplerPlugin],
    *,
    vocab_size: int,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    token_texts: Sequence[str] = (),
    order: Sequence[str] | None = None,
    seed: int = 0,
) -> SequenceSampler:
    """A sampler that has already seen ``answer``."""
    params = params_of(fields, samplers, seed=seed, samplers=None if order is None else tuple(order))
    sampler = SequenceSampler(
        params,
        choice=0,
        vocab_size=vocab_size,
        prompt_token_ids=prompt,
        steps=build_steps(params, samplers),
        token_bytes=tuple(text.encode() for text in token_texts),
    )
    for token_id in answer:
        sampler.accept(token_id)
    return sampler


def count_draws(sampler: SequenceSampler, row: np.ndarray, num_draws: int) -> np.ndarray:
    """How often each token is drawn at so many positions, from the same row."""
    draws = [sampler.sample(row.copy(), position).token_id for position in range(num_draws)]
    return np.bincount(draws, minlength=row.size)
