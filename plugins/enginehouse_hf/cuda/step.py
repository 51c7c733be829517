"""One forward pass as tensors: where its tokens come from, where they go, and who attends to what.

The runner packs spans into one array of integers, which crosses to the device in one copy. Decoding sequences (one
token each) stand first, everything longer behind them. Called by the runner; the networks read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.backend import LastSampled, Span
from enginehouse_hf.cuda.layers import begin_step

__all__ = ["DeviceState", "Lane", "PackedSpans", "Step", "flatten", "pack", "padded_decodes"]

_ALIGNMENT = 32  # integers: every part of the array begins at a multiple, so kernels can rely on it


@frozen(eq=False)
class DeviceState:
    """What stays on the device from step to step.

    Attributes:
        layers: per layer the pool's keys and values, (num_places + 1, num_kv, head_dim); the last place is a dump.
        table: (max_sequences + 1, max_context) int32, the place of every position; the last row is a dump.
        last: (max_sequences + 1,) int32, the last token drawn for each sequence.
    """

    layers: list[tuple[Tensor, Tensor]]
    table: Tensor
    last: Tensor

    @property
    def dump_slot(self) -> int:
        """The row that padding uses."""
        return self.table.shape[0] - 1

    @property
    def dump_place(self) -> int:
        """The place that padding writes to."""
        return self.layers[0][0].shape[0] - 1


@frozen
class Lane:
    """One span of several tokens: rows ``begin`` to ``end`` of the batch, after ``start`` tokens of its sequence."""

    begin: int
    end: int
    start: int

    @property
    def stop(self) -> int:
        """Length of the sequence with this span."""
        return self.start + self.end - self.begin


@frozen(eq=False)
class PackedSpans:
    """Spans in the order in which they are computed, in host memory; all arrays are int32.

    Attributes:
        tokens: (4, T): token ids (-1: the last one drawn), slots, positions, places.
        num_decodes: how many of the first tokens are a span of their own.
        lanes: the longer spans.
        gather: places of everything that the longer spans see, span by span.
        rows: tokens that logits are wanted for, in the order of the spans as they were given.
    """

    tokens: NDArray[np.int32]
    num_decodes: int
    lanes: list[Lane]
    gather: NDArray[np.int32]
    rows: NDArray[np.int32]

    @property
    def is_plain_decode(self) -> bool:
        """Whether every token is a span of its own and wants logits."""
        return not self.lanes and len(self.rows) == self.num_decodes


def pack(
    spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32], table: NDArray[np.int32]
) -> PackedSpans:
    """Put spans in order.

    Args:
        spans: checked.
        sizes: their numbers of tokens.
        places: (sum of sizes,), the place of every new token, span by span.
        table: (max_sequences, max_context), with the new tokens.
    """
    if len(places) == len(spans):
        return _pack_decodes(spans, places)
    begins = [0, *accumulate(sizes)]
    # Single tokens first, those with the most to attend to before others.
    order = sorted(range(len(spans)), key=lambda index: (sizes[index] > 1, -spans[index].start))
    num_decodes = sum(size == 1 for size in sizes)
    tokens = np.empty((4, len(places)), np.int32)
    firsts, lanes, seen, begin = [0] * len(spans), [], [], 0
    for index in order:
        span, size = spans[index], sizes[index]
        end = begin + size
        tokens[0, begin:end] = -1 if isinstance(span.input, LastSampled) else span.input
        tokens[1, begin:end] = span.sequence
        tokens[2, begin:end] = np.arange(span.start, span.start + size)
        tokens[3, begin:end] = places[begins[index] : begins[index] + size]
        if size > 1:
            lanes.append(Lane(begin, end, span.start))
            seen.append(table[span.sequence, : span.start + size])
        firsts[index], begin = begin, end
    rows = [row for index, span in enumerate(spans) for row in _rows(span, firsts[index], sizes[index])]
    return PackedSpans(tokens, num_decodes, lanes, np.concatenate(seen), np.array(rows, np.int32))


def _pack_decodes(spans: Sequence[Span], places: NDArray[np.int32]) -> PackedSpans:
    ids = [-1 if isinstance(span.input, LastSampled) else int(span.input[0]) for span in spans]
    tokens = np.array([ids, [s.sequence for s in spans], [s.start for s in spans], places], np.int32)
    order = np.argsort(-tokens[2], kind="stable")  # the longest first, so that none is left for the end
    rows = np.empty(len(spans), np.int32)
    rows[order] = np.arange(len(spans), dtype=np.int32)
    if any(span.outputs == "none" for span in spans):
        rows = rows[[span.outputs != "none" for span in spans]]
    return PackedSpans(tokens[:, order], len(spans), [], np.empty(0, np.int32), rows)


def _rows(span: Span, first: int, size: int) -> range:
    return {"none": range(0), "last": range(first + size - 1, first + size), "all": range(first, first + size)}[
        span.outputs
    ]


class Step:
    """A forward pass on the device.

    Attributes:
        num_tokens: T.
        num_decodes: how many of the first tokens are a span of their own.
        lanes: the longer spans.
        token_ids: (T,) int64, known once :meth:`begin` has run.
        slots, positions, places: (T,) int32.
        lengths: (num_decodes,) int32, tokens of each decoding sequence with the new one.
        gather: (num_seen,) int32, places that the longer spans see, span by span.
        query_ends, key_ends: (len(lanes) + 1,) int32, running sums of their tokens and of what they see.
        rows: (num_rows,) int32 tokens that logits are wanted for; None is all.
        num_layers: how many layers run; None is all.
    """

    def __init__(self, state: DeviceState, num_tokens: int, num_decodes: int, lanes: list[Lane], ints: Tensor,
                 offsets: dict[str, tuple[int, int]], rows_are_all: bool, num_layers: int | None) -> None:  # fmt: skip
        self.state, self.num_layers = state, num_layers
        self.num_tokens, self.num_decodes, self.lanes = num_tokens, num_decodes, lanes
        part = {name: ints[begin:end] for name, (begin, end) in offsets.items()}
        self._tokens = part["tokens"].view(4, -1)
        self.slots, self.positions, self.places = (row[:num_tokens] for row in self._tokens[1:])
        self.lengths = part["lengths"]
        self.gather, self.query_ends, self.key_ends = part["gather"], part["query_ends"], part["key_ends"]
        self.rows = None if rows_are_all else part["rows"]
        self.token_ids = torch.empty(num_tokens, dtype=torch.int64, device=ints.device)

    @classmethod
    def upload(cls, state: DeviceState, packed: PackedSpans, num_layers: int | None = None) -> Step:
        """The step on the device; one copy from pinned memory, not waited for."""
        array, offsets = _flatten(packed)
        ints = torch.from_numpy(array).pin_memory().to(state.table.device, non_blocking=True)
        num_tokens, is_plain = packed.tokens.shape[1], packed.is_plain_decode
        return cls(state, num_tokens, packed.num_decodes, packed.lanes, ints, offsets, is_plain, num_layers)

    @classmethod
    def static(cls, state: DeviceState, size: int, num_layers: int | None = None) -> tuple[Step, Tensor]:
        """A decode step of ``size`` sequences whose numbers are filled in later, and the tensor that takes them."""
        array, offsets = _flatten(padded_decodes(state, PackedSpans(*_NOTHING), size))
        ints = torch.from_numpy(array).to(state.table.device)
        return cls(state, size, size, [], ints, offsets, True, num_layers), ints

    def begin(self) -> None:
        """First of all: find the token ids and enter the places into the table."""
        begin_step(self._tokens, self.state.last, self.state.table, self.token_ids)


_NOTHING = (np.empty((4, 0), np.int32), 0, [], np.empty(0, np.int32), np.empty(0, np.int32))


def padded_decodes(state: DeviceState, packed: PackedSpans, size: int) -> PackedSpans:
    """Plain decodes filled up to ``size`` with tokens that read and write the dumps only."""
    num_more = size - packed.num_decodes
    dump = np.array([[0], [state.dump_slot], [0], [state.dump_place]], np.int32)
    tokens = np.concatenate([packed.tokens, np.repeat(dump, num_more, 1)], 1)
    return PackedSpans(tokens, size, [], packed.gather, np.arange(size, dtype=np.int32))


def _flatten(packed: PackedSpans) -> tuple[NDArray[np.int32], dict[str, tuple[int, int]]]:
    """Everything in one array, each part aligned; the columns of ``tokens`` are padded as well."""
    num_tokens = packed.tokens.shape[1]
    tokens = np.zeros((4, _aligned(num_tokens)), np.int32)
    tokens[:, :num_tokens] = packed.tokens
    parts = {
        "tokens": tokens.reshape(-1),
        "lengths": packed.tokens[2, : packed.num_decodes] + 1,
        "gather": packed.gather,
        "query_ends": np.array([0, *accumulate(lane.end - lane.begin for lane in packed.lanes)], np.int32),
        "key_ends": np.array([0, *accumulate(lane.stop for lane in packed.lanes)], np.int32),
        "rows": packed.rows,
    }
    offsets, begin = {}, 0
    for name, part in parts.items():
        offsets[name] = begin, begin + len(part)
        begin += _aligned(len(part))
    array = np.zeros(begin, np.int32)
    for name, part in parts.items():
        array[offsets[name][0] : offsets[name][1]] = part
    return array, offsets


def flatten(packed: PackedSpans) -> NDArray[np.int32]:
    """The numbers of a step as :meth:`Step.static` wants them."""
    return _flatten(packed)[0]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
