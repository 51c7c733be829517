"""Recurrent modules of a transformers model over pools of states, one row per sequence.

:class:`PooledMixers` replaces the ``forward`` of the modules that :class:`enginehouse_hf.recurrent.Mixers` has found.
Single tokens of all sequences are one call, whose rows are looked up on the device: it can be recorded as a graph.
Longer spans are called by size. A pass reads one row of each sequence and writes the one beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.cuda.packing import Segment
from enginehouse_hf.cuda.recurrent_parts import RecurrentPart, find_part
from enginehouse_hf.cuda.state_pools import StatePools
from enginehouse_hf.recurrent import LayerCache, Mixer

__all__ = ["PooledMixers", "RecurrentStep"]


class RecurrentStep(Protocol):
    """The part of a step that recurrent modules use; see :class:`enginehouse_hf.cuda.step.Step`."""

    num_decodes: int
    segments: list[Segment]
    sources: Tensor

    @property
    def pools(self) -> StatePools:
        """States of all sequences."""
        ...


class PooledMixers:
    """Calls the recurrent modules of a model with states of the pools of the current step.

    Args:
        mixers: the modules; they are changed for as long as the model lives.
    """

    def __init__(self, mixers: Iterable[Mixer]) -> None:
        self._mixers = list(mixers)
        self._parts: dict[int, RecurrentPart] = {}
        self._step: RecurrentStep | None = None
        self._sources = self._targets = torch.empty(0, dtype=torch.int64)
        for mixer in self._mixers:
            mixer.module.forward = partial(self._forward, mixer)

    def use_kernels(self, pools: StatePools, hidden_size: int) -> None:
        """Compute single tokens with kernels of our own in modules for which these give the same."""
        for mixer in self._mixers:
            part = find_part(mixer, pools.layer(mixer.layer), hidden_size)
            if part is not None:
                self._parts[mixer.layer] = part

    def begin(self, step: RecurrentStep) -> None:
        """Prepare a pass."""
        self._step = step
        self._sources = step.sources.long()
        self._targets = self._sources ^ 1

    def _forward(
        self, mixer: Mixer, hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
    ) -> Tensor:
        """Run one module over the packed row, (1, T, hidden_size)."""
        if attention_mask is not None:
            raise UnsupportedAttention("a mask of the model's own")
        step = self._step
        assert step is not None, "begin was called"
        hidden, num_decodes = hidden_states[0], step.num_decodes
        if num_decodes == len(hidden):
            return self._decode(mixer, hidden)[None]
        output = torch.empty_like(hidden)
        if num_decodes:
            output[:num_decodes] = self._decode(mixer, hidden[:num_decodes])
        for (size, is_later), indices in _by_size(step.segments).items():
            spans = [slice(step.segments[index].begin, step.segments[index].begin + size) for index in indices]
            columns = [num_decodes + index for index in indices]
            mixed = self._run(mixer, torch.stack([hidden[span] for span in spans]), columns, is_later=is_later)
            for place, span in enumerate(spans):
                output[span] = mixed[place]
        return output[None]

    def _decode(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Append a token, (hidden_size), to each of the first N sequences."""
        assert self._step is not None
        columns = range(len(hidden))
        if (part := self._parts.get(mixer.layer)) is not None:
            return part.step(hidden, self._step.pools.layer(mixer.layer), _chosen(self._sources, columns))
        return self._run(mixer, hidden[:, None], columns, is_later=True)[:, 0]

    def _run(self, mixer: Mixer, rows: Tensor, columns: Sequence[int], *, is_later: bool) -> Tensor:
        """Append tokens, (N, T, hidden_size), to sequences; ``columns`` are their numbers in the step."""
        assert self._step is not None
        sources, targets = _chosen(self._sources, columns), _chosen(self._targets, columns)
        pools = self._step.pools.layer(mixer.layer)
        states = {key: pool.index_select(0, sources) for key, pool in pools.items()} if is_later else {}
        cache = LayerCache(states)
        mixed = mixer.run(rows, cache)
        for key, pool in pools.items():
            pool.index_copy_(0, targets, cache.states[key].to(pool.dtype))
        return mixed


def _by_size(segments: Sequence[Segment]) -> dict[tuple[int, bool], list[int]]:
    """Group spans, by index, that have the same number of tokens and all, or none, tokens before them."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault((segment.end - segment.begin, segment.start > 0), []).append(index)
    return groups


def _chosen(rows: Tensor, columns: Sequence[int]) -> Tensor:
    """Return the entries of these columns, without a copy from the host."""
    if isinstance(columns, range):
        return rows[columns.start : columns.stop]
    return torch.cat([rows[column : column + 1] for column in columns])
