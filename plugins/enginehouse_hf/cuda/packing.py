"""Spans in the order in which they are computed, as arrays in host memory. Knows no device.

Decodes stand first, each token a column that attends for itself, everything longer behind them. A token with drafts
behind it is so many decodes of one sequence: all keys of a step lie in the pool before a layer attends, and each column
sees as many of them as its position allows. So checking drafts is a decode step, with the graph of one.

Called by the runner; ``step.py`` takes the result to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import LastSampled, Span

__all__ = ["Lane", "PackedSpans", "flatten", "pack"]

_MAX_CHECKED = 65
"""Tokens of a span whose every row is wanted, a token and its drafts, that are computed as decodes, at most."""

_ALIGNMENT = 32  # integers: every part of the array begins at a multiple, so kernels can rely on it


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
        num_decodes: how many of the first tokens attend for themselves.
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
        """Whether every token attends for itself and wants logits."""
        return not self.lanes and len(self.rows) == self.num_decodes

    def take(self, columns: NDArray[np.intp]) -> PackedSpans:
        """Some of plain decodes, in the order of ``columns``; all of them want logits."""
        rows = np.arange(len(columns), dtype=np.int32)
        return PackedSpans(self.tokens[:, columns], len(columns), [], self.gather, rows)


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
    are_decodes = [_is_decode(span, size) for span, size in zip(spans, sizes, strict=True)]
    # Decodes first, those with the most to attend to before others.
    order = sorted(range(len(spans)), key=lambda index: (not are_decodes[index], -spans[index].start))
    num_decodes = sum(size for size, is_decode in zip(sizes, are_decodes, strict=True) if is_decode)
    tokens = np.empty((4, len(places)), np.int32)
    firsts, lanes, seen, begin = [0] * len(spans), [], [np.empty(0, np.int32)], 0
    for index in order:
        span, size = spans[index], sizes[index]
        end = begin + size
        tokens[0, begin:end] = -1 if isinstance(span.input, LastSampled) else span.input
        tokens[1, begin:end] = span.sequence
        tokens[2, begin:end] = np.arange(span.start, span.start + size)
        tokens[3, begin:end] = places[begins[index] : begins[index] + size]
        if not are_decodes[index]:
            lanes.append(Lane(begin, end, span.start))
            seen.append(table[span.sequence, : span.start + size])
        firsts[index], begin = begin, end
    rows = [row for index, span in enumerate(spans) for row in _rows(span, firsts[index], sizes[index])]
    return PackedSpans(tokens, num_decodes, lanes, np.concatenate(seen), np.array(rows, np.int32))


def _is_decode(span: Span, size: int) -> bool:
    return size == 1 or (span.outputs == "all" and size <= _MAX_CHECKED)


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


def flatten(packed: PackedSpans) -> tuple[NDArray[np.int32], dict[str, tuple[int, int]]]:
    """Everything in one array, each part aligned, and where each part lies; columns of ``tokens`` are padded, too."""
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


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
