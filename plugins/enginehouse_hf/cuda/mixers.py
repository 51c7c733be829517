"""Recurrent modules of a transformers model over pools of states, one row per sequence.

:class:`PooledMixers` replaces the ``forward`` of the modules that :class:`enginehouse_hf.recurrent.Mixers` has found.
Single tokens of all sequences are one call, whose rows are looked up on the device: it can be recorded as a graph.
So are tokens whose drafts may be rejected: a call for the first of each sequence, one for the second and so on, each of
which leaves a state. Longer spans are called by size. A pass reads one row of each sequence and writes others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.cuda.packing import Segment
from enginehouse_hf.cuda.state_pools import StatePools
from enginehouse_hf.facts import StateForm
from enginehouse_hf.recurrent import LayerCache, Mixer

__all__ = ["PooledMixers", "Pools", "RecurrentPart", "RecurrentStep", "Spans"]

Pools = Mapping[tuple[str, int], Tensor]
"""States of a layer by kind and number, (num_rows, ...)."""


@frozen(eq=False)
class Spans:
    """Longer spans of a step.

    Attributes:
        sources, targets: (num_spans,) int64, rows of the states that are read, and that are written.
        ends: (num_spans + 1,) int32, running sums of the numbers of tokens.
        longest: number of tokens of the longest span.
    """

    sources: Tensor
    targets: Tensor
    ends: Tensor
    longest: int


class RecurrentPart(Protocol):
    """A recurrent module in kernels."""

    def step(self, hidden: Tensor, pools: Pools, rows: Tensor) -> Tensor:
        """Append K tokens to each of N sequences.

        Args:
            hidden: (T, hidden_size), T = K * N: the first token of each sequence, then the second of each, and so on.
            pools: changed in all rows but the first of each sequence.
            rows: (K + 1, N) int64, rows of each sequence: a token reads one and writes the next.

        Returns:
            (T, hidden_size), or (T, n, hidden_size) float32, whose n rows add up to the result.
        """
        ...

    def extend(self, hidden: Tensor, pools: Pools, spans: Spans) -> Tensor | None:
        """Append tokens, (T, hidden_size), to sequences; (T, hidden_size). None if the module itself computes spans."""
        ...


class RecurrentStep(Protocol):
    """The part of a step that recurrent modules use; see :class:`enginehouse_hf.cuda.step.Step`."""

    num_decodes: int
    segments: list[Segment]
    query_ends: Tensor
    state_rows: Tensor

    @property
    def pools(self) -> StatePools:
        """States of all sequences."""
        ...


@frozen(eq=False)
class _OneSpan:
    """A step of one span, at the beginning of a sequence."""

    num_decodes: int
    segments: list[Segment]
    query_ends: Tensor
    state_rows: Tensor
    pools: StatePools


class PooledMixers:
    """Calls the recurrent modules of a model with states of the pools of the current step.

    Args:
        mixers: the modules; they are changed for as long as the model lives.
        forms: parts of the state of a sequence.

    Attributes:
        all: the modules, in their order.
    """

    def __init__(self, mixers: Iterable[Mixer], forms: Sequence[StateForm], device: torch.device) -> None:
        self.all = tuple(mixers)
        self._by_layer = {mixer.layer: mixer for mixer in self.all}
        self._forms, self._device = forms, device
        self._parts: dict[int, RecurrentPart] = {}
        self._step: RecurrentStep | None = None
        self._rows = torch.empty(2, 0, dtype=torch.int64)
        for mixer in self.all:
            mixer.module.forward = partial(self._forward, mixer)

    def use_kernels(self, find: Callable[[Mixer, Pools], RecurrentPart | None]) -> None:
        """Use kernels of our own for the modules for which ``find``, which must not change the pools, returns some."""
        pools = StatePools(self._forms, 1, self._device)
        for mixer in self.all:
            part = find(mixer, pools.layer(mixer.layer))
            if part is not None:
                self._parts[mixer.layer] = part

    @property
    def has_kernels(self) -> bool:
        """True if some of the modules have kernels of our own."""
        return bool(self._parts)

    def begin(self, step: RecurrentStep) -> None:
        """Prepare a pass."""
        self._step = step
        self._rows = step.state_rows.long()

    def begin_alone(self, num_tokens: int) -> None:
        """Prepare a pass over one span at the beginning of a sequence, whose state is not kept."""
        ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=self._device)
        pools = StatePools(self._forms, 1, self._device)
        rows = torch.tensor([[0], [1]], device=self._device)
        self.begin(_OneSpan(0, [Segment(0, num_tokens, 0)], ends, rows, pools))

    def _forward(
        self, mixer: Mixer, hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
    ) -> Tensor:
        """Run one module over the packed row, (1, T, hidden_size)."""
        if attention_mask is not None:
            raise UnsupportedAttention("a mask of the model's own")
        return _summed(self.run(mixer.layer, hidden_states[0])).to(hidden_states.dtype)[None]

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """Run the module of a layer over all tokens of the step, (T, hidden_size).

        Returns:
            (T, hidden_size), or (T, n, hidden_size) float32, whose n rows add up to the result.
        """
        step, mixer = self._step, self._by_layer[layer]
        assert step is not None, "begin was called"
        num_decodes = step.num_decodes
        if num_decodes == len(hidden):
            return self._decode(mixer, hidden)
        extended = self._extend(mixer, hidden[num_decodes:])
        if extended is not None and not num_decodes:
            return extended
        output = torch.empty_like(hidden)
        if num_decodes:
            output[:num_decodes] = _summed(self._decode(mixer, hidden[:num_decodes]))
        if extended is not None:
            output[num_decodes:] = extended
            return output
        for (size, is_later), indices in _by_size(step.segments).items():
            spans = [slice(step.segments[index].begin, step.segments[index].begin + size) for index in indices]
            columns = [self._rows[:, num_decodes + index] for index in indices]  # a list of numbers would be copied
            rows = torch.stack([hidden[span] for span in spans])
            mixed = self._run(mixer, rows, *torch.stack(columns, 1), is_later=is_later)
            for place, span in enumerate(spans):
                output[span] = mixed[place]
        return output

    def _extend(self, mixer: Mixer, hidden: Tensor) -> Tensor | None:
        """Append the longer spans, (T, hidden_size), with kernels of our own, if there are such."""
        step, part = self._step, self._parts.get(mixer.layer)
        assert step is not None
        if part is None:
            return None
        longest = max(segment.end - segment.begin for segment in step.segments)
        spans = Spans(*self._rows[:, step.num_decodes :], step.query_ends, longest)
        return part.extend(hidden, step.pools.layer(mixer.layer), spans)

    def _decode(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Append tokens, (T, hidden_size), to the first sequences, as :meth:`RecurrentPart.step`; returns as it."""
        assert self._step is not None
        rows = self._rows[:, : len(hidden) // (len(self._rows) - 1)]
        if (part := self._parts.get(mixer.layer)) is not None:
            return part.step(hidden, self._step.pools.layer(mixer.layer), rows)
        tokens = zip(hidden.split(rows.shape[1]), pairwise(rows), strict=True)
        return torch.cat([self._run(mixer, one[:, None], *around, is_later=True)[:, 0] for one, around in tokens])

    def _run(self, mixer: Mixer, hidden: Tensor, sources: Tensor, targets: Tensor, *, is_later: bool) -> Tensor:
        """Append tokens, (N, T, hidden_size), to the states in rows, (N,) each."""
        assert self._step is not None
        pools = self._step.pools.layer(mixer.layer)
        states = {key: pool.index_select(0, sources) for key, pool in pools.items()} if is_later else {}
        cache = LayerCache(states)
        mixed = mixer.run(hidden, cache)
        for key, pool in pools.items():
            pool.index_copy_(0, targets, cache.states[key].to(pool.dtype))
        return mixed


def _summed(update: Tensor) -> Tensor:
    return update if update.dim() == 2 else update.sum(1)


def _by_size(segments: Sequence[Segment]) -> dict[tuple[int, bool], list[int]]:
    """Group spans, by index, that have the same number of tokens and all, or none, tokens before them."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, segment in enumerate(segments):
        groups.setdefault((segment.end - segment.begin, segment.start > 0), []).append(index)
    return groups
