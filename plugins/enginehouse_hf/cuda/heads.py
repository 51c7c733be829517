"""Memory of a draft head in the pool, and its passes.

The pair of a position (see ``heads/drafting.py``) has the place of the token after it: that token is part of the pair,
and a place may be shared by sequences that agree up to it only. So the head reads the table of places one position
further than the model. Features are the keys of a layer without values, at their own positions.

A draft is launched as a whole: a recorded pass ends by making its inputs those of the next one, so that the host only
replays it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.features import FeatureWriter
from enginehouse_hf.cuda.graphs import Recorder, graph_sizes
from enginehouse_hf.cuda.kv_tensor import KvTensor
from enginehouse_hf.cuda.packing import PackedSpans, flatten, pack
from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.step import DeviceState, Step, padded_decodes
from enginehouse_hf.heads.drafting import DraftHead, Guesses, Pairs, guess

__all__ = ["PoolHeadMemory"]

_log = logging.getLogger(__name__)

_MAX_SINGLE = 65
"""Pairs of a sequence up to which each attends individually, as the tokens of a step that verifies drafts."""

_MAX_STATIC = 64
"""Pairs that a recorded pass reads at most: one after each accepted token, for some sequences."""


class _Shapes:
    """Stands for a step, to find the shapes of the head's keys and values."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def attend(self, _index: int, query: Tensor, key: Tensor, value: Tensor, **_scores: Any) -> Tensor:
        """Implements :class:`enginehouse_hf.attention.AnyStep`."""
        self.found = [(part.shape[1], part.shape[3]) for part in (key, value)]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


_Work = Callable[[Step, Tensor], tuple[Tensor, Tensor]]
"""Runs the head over a step and features; returns states and guesses as :attr:`Guesses.found`, for each pair."""


class _StaticPass:
    """A pass with static inputs, which after it are those of the next one of a draft; a graph if that is possible.

    Attributes:
        given: (size, feature_size), the features to be filled in.
    """

    def __init__(self, state: DeviceState, size: int, given: Tensor) -> None:
        self.given = given
        self._state, self._size = state, size
        self._step, self._numbers = Step.static(state, size)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: tuple[Tensor, Tensor]

    def record(self, work: _Work, recorder: Recorder) -> None:
        """Record the graph. Raises RuntimeError if the head reads values on the host in between."""
        self._graph, self._found = recorder.record(partial(self._run, work))

    def forget(self) -> None:
        """Launch kernel by kernel from now on."""
        self._graph = None

    def fill(self, packed: PackedSpans, token_ids: Tensor | None = None) -> None:
        """Set pairs, padded; ``token_ids``, (num_decodes,) int32, replace those of the pairs."""
        array, _ = flatten(padded_decodes(self._state, packed, self._size))
        self._numbers.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        if token_ids is not None:
            self._numbers[: len(token_ids)] = token_ids  # the first row of the tokens

    def run(self, work: _Work) -> tuple[Tensor, Tensor]:
        """Return states and guesses of all pairs; valid until any next pass."""
        if self._graph is None:
            return self._run(work)
        self._graph.replay()
        return self._found

    def _run(self, work: _Work) -> tuple[Tensor, Tensor]:
        states, found = work(self._step, self.given)
        self._step.advance(found[0])
        self.given.copy_(states)
        return states, found


class PoolHeadMemory:
    """Implements :class:`enginehouse_hf.heads.drafting.HeadMemory`; guesses stay on the device until all are read.

    Args:
        head: the head; its attention uses the layer after those of the model.
        state: the pool; gets two more layers.
        positions: the places of all sequences.
        num_layers: of the model; the layer of the head has the next number.
        hidden_size: width of the model's states.
        dtype: their type, which the keys and values of the head have, too.

    Raises:
        ModelLoadError: there is not enough device memory.
    """

    runs_ahead = True

    def __init__(
        self,
        head: DraftHead,
        state: DeviceState,
        positions: PositionPool,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._head, self._positions = head, positions
        self._attention = PoolAttention(None)
        like = state.table.new_zeros(state.num_places + 1, 0, 0, dtype=dtype)
        zeros = [like.new_zeros(1, hidden_size)] * len(head.reads)
        nothing, shapes = torch.zeros(1, dtype=torch.int64, device=like.device), _Shapes()
        features = head.features(zeros)
        head.logits(head.run(nothing, features, nothing, shapes))
        forms = [*shapes.found, (1, features.shape[-1]), (1, 0)]
        try:
            keys, values, kept, empty = (like.new_zeros(len(like), heads, dim) for heads, dim in forms)
        except torch.cuda.OutOfMemoryError as error:
            num_bytes = len(like) * sum(heads * dim for heads, dim in forms) * like.itemsize
            raise ModelLoadError(
                f"the draft head needs {num_bytes / 2**30:.1f} GiB for {len(like) - 1} KV positions beside the "
                "model's; lower cache_tokens or memory_share"
            ) from error
        self.writer = FeatureWriter(head, num_layers + 1)
        self._features = kept[:, 0]
        state.layers[num_layers], state.layers[num_layers + 1] = (
            (KvTensor(keys), KvTensor(values)),
            (KvTensor(kept), KvTensor(empty)),
        )
        state.table[state.dump_slot].fill_(state.dump_place)
        self._state = DeviceState(state.layers, state.num_places, state.table[:, 1:], state.last)
        self._passes = {
            size: _StaticPass(self._state, size, kept.new_zeros(size, kept.shape[-1]))
            for size in graph_sizes(max(_MAX_STATIC, state.dump_slot))  # up to one pair of every sequence
        }

    def record(self, recorder: Recorder) -> None:
        """Record the passes as graphs; none if the head reads values on the host in between."""
        try:
            for size, one in reversed(self._passes.items()):
                if size <= _MAX_STATIC:
                    one.record(self._compute, recorder)
        except RuntimeError as error:
            _log.warning("hf: passes of the draft head cannot be recorded and are launched one by one: %s", error)
            torch.cuda.synchronize()
            for one in self._passes.values():
                one.forget()

    def warm_up(self, max_tokens: int) -> None:
        """Read a text of at most ``max_tokens``, so that no request waits for a compiler or a library that starts."""
        length = min(max_tokens, self._positions.free_tokens(), self._positions.table.shape[1], 2 * _MAX_SINGLE)
        if length < 2:
            return
        sequence = self._positions.open()
        try:
            tokens = [Span(sequence, 0, np.zeros(length, np.int32), "none")]
            self._positions.append(tokens, self._positions.check(tokens))
            for num_pairs in (length - 1, 1):
                self.run([Pairs(sequence, 0, [0] * num_pairs)])
        finally:
            self._positions.free(sequence)

    def run(self, pairs: Sequence[Pairs]) -> Guesses:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        packed, sizes = self._pack(pairs)
        places = self._positions.table[packed.tokens[1], packed.tokens[2]]
        indices = self._on_device(np.concatenate([places, packed.rows[np.cumsum(sizes) - 1]]))
        places, last = indices[: len(places)], indices[len(places) :]
        if packed.is_plain_decode and packed.num_decodes <= _MAX_STATIC:
            one = self._pass_for(packed.num_decodes)
            one.fill(packed)
            torch.index_select(self._features, 0, places, out=one.given[: packed.num_decodes])
            states, found = one.run(self._compute)
            return Guesses(states[last], found[:, last])
        return Guesses(*self._compute(Step.upload(self._state, packed), self._features[places], last))

    def extend(self, starts: Mapping[int, int], guesses: Guesses, num_tokens: int) -> Iterator[Guesses]:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        sequences, firsts = np.array(list(starts), np.int32), np.array(list(starts.values()), np.int32)
        self._allocate({sequence: start + num_tokens + 1 for sequence, start in starts.items()})
        positions = firsts[:, None] + np.arange(num_tokens, dtype=np.int32)
        places = self._positions.table[sequences[:, None], positions + 1]
        slots = np.repeat(sequences, num_tokens)
        cells = self._on_device(np.stack([slots, positions.reshape(-1), places.reshape(-1)]))
        self._state.table[cells[0], cells[1]] = cells[2].to(torch.int32)
        one, size = self._pass_for(len(starts)), len(starts)
        tokens = np.stack([np.zeros(size, np.int32), sequences, firsts, places[:, 0]])
        one.fill(
            PackedSpans(tokens, size, [], np.empty(0, np.int32), np.arange(size, dtype=np.int32)), guesses.found[0]
        )
        one.given[:size].copy_(guesses.states)
        for _ in range(num_tokens):
            states, found = one.run(self._compute)
            yield Guesses(states[:size], found[:, :size].clone())

    def _pass_for(self, num_pairs: int) -> _StaticPass:
        return next(one for size, one in self._passes.items() if size >= num_pairs)

    def _compute(self, step: Step, given: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the head over the pairs of a step; return states and guesses of all pairs, or those of ``rows``."""
        step.begin()
        states = self._head.run(step.token_ids, given, step.positions.long(), PoolStep(step, self._attention))
        states = states if rows is None else states[rows]
        return states, guess(self._head, states)

    def drop_drafts(self, sequence: int, length: int) -> None:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        self._positions.truncate(sequence, length)

    def close(self) -> None:
        """Nothing to stop: the network ends with the model."""

    def _pack(self, pairs: Sequence[Pairs]) -> tuple[PackedSpans, list[int]]:
        """Allocate places for pairs beyond the text, and pack all pairs as if they were tokens.

        Returns:
            The pairs, and the number of rows of each sequence, of which the last one is needed.
        """
        self._allocate({one.sequence: one.stop + 1 for one in pairs})
        table = self._positions.table[:, 1:]  # the place of the token after each position
        sizes = [len(one.token_ids) for one in pairs]
        spans = [
            Span(one.sequence, one.start, np.array(one.token_ids, np.int32), "all" if size <= _MAX_SINGLE else "last")
            for one, size in zip(pairs, sizes, strict=True)
        ]
        places = np.concatenate([table[one.sequence, one.start : one.stop] for one in pairs])
        return pack(spans, sizes, places, table), [size if size <= _MAX_SINGLE else 1 for size in sizes]

    def _allocate(self, lengths: Mapping[int, int]) -> None:
        """Allocate places, up to a length of each sequence, beyond the text. Raises CacheFull."""
        held = {sequence: self._positions.length(sequence) for sequence in lengths}
        beyond = [
            Span(sequence, held[sequence], np.zeros(length - held[sequence], np.int32), "none")
            for sequence, length in lengths.items()
            if length > held[sequence]
        ]
        if beyond:
            self._positions.append(beyond, self._positions.check(beyond))

    def _on_device(self, indices: NDArray[np.int32]) -> Tensor:
        """The same as int64, without waiting for the device."""
        return torch.from_numpy(indices.astype(np.int64)).pin_memory().to(self._features.device, non_blocking=True)
