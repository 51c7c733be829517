"""Memory of a draft head in the pool.

The pair of a position (see ``heads/drafting.py``) has the place of the token after it: that token is part of the pair,
and a place may be shared by sequences that agree up to it only. So the head has a table of its own, one position behind
that of the model. Features are the keys of a layer without values, at their own positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.features import FeatureWriter
from enginehouse_hf.cuda.graphs import Recorder
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


class _Shapes:
    """Stands for a step, to find the shapes of the head's keys and values."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def attend(self, _index: int, query: Tensor, key: Tensor, value: Tensor, **_scores: Any) -> Tensor:
        """Implements :class:`enginehouse_hf.attention.AnyStep`."""
        self.found = [(part.shape[1], part.shape[3]) for part in (key, value)]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@frozen(eq=False)
class _Recorded:
    """A recorded pass, its static inputs, and the tensors that each replay fills; ``step`` holds the token ids."""

    graph: torch.cuda.CUDAGraph
    step: Step
    numbers: Tensor
    given: Tensor
    found: tuple[Tensor, Tensor]

    def run(self, packed: PackedSpans, given: Tensor) -> tuple[Tensor, Tensor]:
        """Replay for padded pairs; ``given`` has the features of those at the beginning."""
        array, _ = flatten(packed)
        self.numbers.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        self.given[: len(given)].copy_(given)
        self.graph.replay()
        return self.found


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
        ModelLoadError: there is not enough device memory, or the layers of the model share keys and values.
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
        self._head, self._model_state, self._positions = head, state, positions
        self._attention = PoolAttention(None)
        self._graphs: dict[int, _Recorded] = {}
        like = state.table.new_zeros(state.num_places + 1, 0, 0, dtype=dtype)
        zeros = [like.new_zeros(1, hidden_size)] * len(head.reads)
        nothing, shapes = torch.zeros(1, dtype=torch.int64, device=like.device), _Shapes()
        with torch.inference_mode():
            features = head.features(zeros)
            head.logits(head.run(nothing, features, nothing, shapes))
        forms = [*shapes.found, (1, features.shape[-1]), (1, 0)]
        try:
            keys, values, kept, empty = (like.new_zeros(len(like), heads, dim) for heads, dim in forms)
            table = torch.zeros_like(state.table)
        except torch.cuda.OutOfMemoryError as error:
            num_bytes = len(like) * sum(heads * dim for heads, dim in forms) * like.itemsize
            raise ModelLoadError(
                f"the draft head needs {num_bytes / 2**30:.1f} GiB for {len(like) - 1} KV positions beside the "
                "model's; lower cache_tokens or memory_share"
            ) from error
        self.writer = FeatureWriter(head, num_layers + 1)
        self._features = kept
        state.layers[num_layers], state.layers[num_layers + 1] = (
            (KvTensor(keys), KvTensor(values)),
            (KvTensor(kept), KvTensor(empty)),
        )
        self._state = DeviceState(state.layers, state.num_places, table, torch.zeros_like(state.last))

    def record(self, sizes: Sequence[int], recorder: Recorder) -> None:
        """Record passes over up to that many pairs as graphs; none if the head reads values on the host in between."""
        try:
            for size in reversed(sizes):
                step, numbers = Step.static(self._state, size)
                given = self._features.new_zeros(size, self._features.shape[2])
                graph, found = recorder.record(partial(self._compute, step, given))
                self._graphs[size] = _Recorded(graph, step, numbers, given, found)
        except RuntimeError as error:
            _log.warning("hf: passes of the draft head cannot be recorded and are launched one by one: %s", error)
            torch.cuda.synchronize()
            self._graphs.clear()

    def run(self, pairs: Sequence[Pairs], after: Guesses | None = None) -> Guesses:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        packed, sizes = self._pack(pairs)
        if after is None:
            places = self._positions.table[packed.tokens[1], packed.tokens[2]]
            given = self._features[self._on_device(places), 0]
            self._copy_table([one.sequence for one in pairs])
        else:
            given = torch.empty_like(after.states)
            given[self._on_device(packed.rows)] = after.states
            self._state.last[self._on_device(np.array([one.sequence for one in pairs], np.int32))] = after.token_ids
        last = self._on_device(packed.rows[np.cumsum(sizes) - 1])
        size = next((size for size in sorted(self._graphs) if size >= packed.num_decodes), None)
        if packed.is_plain_decode and size is not None:
            states, found = self._graphs[size].run(padded_decodes(self._state, packed, size), given)
            return Guesses(states[last], found[:, last])
        return Guesses(*self._compute(Step.upload(self._state, packed), given, last))

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
        lengths = [self._positions.length(one.sequence) for one in pairs]
        beyond = [
            Span(one.sequence, length, np.zeros(one.stop + 1 - length, np.int32), "none")
            for one, length in zip(pairs, lengths, strict=True)
            if one.stop >= length
        ]
        if beyond:
            self._positions.append(beyond, self._positions.check(beyond))
        table = self._positions.table[:, 1:]  # the place of the token after each position
        sizes = [len(one.token_ids) for one in pairs]
        spans = [
            Span(one.sequence, one.start, np.array(one.token_ids, np.int32), "all" if size <= _MAX_SINGLE else "last")
            for one, size in zip(pairs, sizes, strict=True)
        ]
        places = np.concatenate([table[one.sequence, one.start : one.stop] for one in pairs])
        return pack(spans, sizes, places, table), [size if size <= _MAX_SINGLE else 1 for size in sizes]

    def _copy_table(self, sequences: Sequence[int]) -> None:
        """Take over the places of all tokens that the model holds."""
        slots = self._on_device(np.array(sequences, np.int32))
        self._state.table[slots, :-1] = self._model_state.table[slots, 1:]

    def _on_device(self, indices: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._features.device)
