"""Spans in order of computation, as arrays in host memory. Does not know devices.

Decodes come first, each token a column that attends individually, followed by all longer spans. A token with drafts
after it becomes several decodes of one sequence: all keys of a step are in the pool before a layer attends, and each
column sees those up to its position. Verifying drafts is thus a decode step, and uses its graph. So does a step with
short prompts, or ends of prompts, if all its spans are short. Not so in a model with recurrent layers, whose tokens of
one sequence depend on each other within a layer: there a step that verifies drafts has the first tokens of all
sequences, then the second ones, and so on.

Called by the runner; ``step.py`` copies the result to the device at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import LastSampled, Span

__all__ = ["PackedSpans", "Segment", "are_short", "flatten", "pack", "pack_by_place", "pack_chunk"]

_MAX_CHECKED = 65
"""Maximum length of a span with logits for all tokens (a token and its drafts) that is computed as decodes."""

_MAX_SHORT = 64
"""Maximum length of other spans that are computed as decodes in a recorded step."""

_MAX_SEEN = 1 << 16
"""Maximum number of keys that the columns of these spans read in such a step: each reads all before it."""

_NONE: NDArray[np.int32] = np.empty(0, np.int32)
_NO_ROWS: NDArray[np.int32] = np.empty((2, 0), np.int32)
_NO_SCALES: NDArray[np.float32] = np.empty((0, 0), np.float32)

_ALIGNMENT = 32  # int32 values: every part of the array starts at a multiple, so kernels can rely on it


@frozen
class Segment:
    """One span of several tokens: rows ``begin`` to ``end`` of the batch, after ``start`` tokens of its sequence.

    Attributes:
        sees_ahead: its tokens attend to each other, not only to those before them.
    """

    begin: int
    end: int
    start: int
    sees_ahead: bool = False

    @property
    def stop(self) -> int:
        """Length of the sequence with this span."""
        return self.start + self.end - self.begin


@frozen(eq=False)
class PackedSpans:
    """Spans in order of computation, in host memory; all arrays are int32.

    Attributes:
        tokens: (4, T): token ids (-1: the last one drawn), slots, positions, places.
        num_decodes: number of leading tokens that attend individually.
        segments: the longer spans.
        gather: places visible to the longer spans, span by span.
        rows: tokens whose logits are requested, in the original order of the spans.
        state_rows: (K + 1, N), rows of the states of recurrent layers: of every decode, then of every longer span. A
            token reads one and writes the next; K is 1, or more in a pass of :func:`pack_by_place`.
        scales: (num_adapters, T) float32, how much each token uses of each adapter; empty if none uses any.
        rotary: (T,), positions for the rotary embedding where these differ from those in the sequence (M-RoPE).
    """

    tokens: NDArray[np.int32]
    num_decodes: int
    segments: list[Segment]
    gather: NDArray[np.int32]
    rows: NDArray[np.int32]
    state_rows: NDArray[np.int32] = _NO_ROWS
    scales: NDArray[np.float32] = _NO_SCALES
    rotary: NDArray[np.int32] | None = None

    @property
    def rotary_positions(self) -> NDArray[np.int32]:
        """(T,), positions for the rotary embedding."""
        return self.tokens[2] if self.rotary is None else self.rotary

    def shifted(self, saved_positions: Mapping[int, int]) -> PackedSpans:
        """Return the same with rotary positions that are less, by a number for some sequences."""
        less = [saved_positions.get(slot, 0) for slot in self.tokens[1].tolist()]
        return evolve(self, rotary=self.tokens[2] - np.array(less, np.int32))

    @property
    def span_tokens(self) -> int:
        """K: the tokens of each sequence in a pass of :func:`pack_by_place`, else 1."""
        return len(self.state_rows) - 1

    @property
    def is_plain_decode(self) -> bool:
        """True if every token attends individually and requests logits."""
        return not self.segments and len(self.rows) == self.num_decodes

    def take(self, columns: NDArray[np.intp]) -> PackedSpans:
        """Select some of plain decodes without adapters, in the order of ``columns``; all of them request logits."""
        rows = np.arange(len(columns), dtype=np.int32)
        return PackedSpans(self.tokens[:, columns], len(columns), [], self.gather, rows)


def are_short(spans: Sequence[Span], sizes: Sequence[int]) -> bool:
    """Return True if all spans can be computed as decodes without reading too much; not with recurrent layers."""
    others = [(span, size) for span, size in zip(spans, sizes, strict=True) if not _is_decode(span, size, True)]
    num_seen = sum(size * (span.start + size) for span, size in others)
    return num_seen <= _MAX_SEEN and all(size <= _MAX_SHORT for _, size in others)


def pack(
    spans: Sequence[Span],
    sizes: Sequence[int],
    places: NDArray[np.int32],
    table: NDArray[np.int32],
    state_rows: NDArray[np.int32] | None = None,
    handles: Sequence[int] = (),
    *,
    as_decodes: bool = False,
) -> PackedSpans:
    """Order spans and pack them.

    Args:
        spans: checked spans.
        sizes: their numbers of tokens.
        places: (sum of sizes,), the place of every new token, span by span.
        table: (max_sequences, max_context), including the new tokens.
        state_rows: (2, len(spans)), rows of the states of recurrent layers, which are read and written; None without
            such layers.
        handles: the adapter at each index of the stacks; 0 is none.
        as_decodes: every token is a decode, also those of longer spans; see :func:`are_short`.
    """
    if len(places) == len(spans):
        return _pack_decodes(spans, places, state_rows, handles)
    begins = [0, *accumulate(sizes)]
    may_check = state_rows is None
    are_decodes = [as_decodes or _is_decode(span, size, may_check) for span, size in zip(spans, sizes, strict=True)]
    # Decodes first, in descending order of sequence length.
    order = sorted(range(len(spans)), key=lambda index: (not are_decodes[index], -spans[index].start))
    num_decodes = sum(size for size, is_decode in zip(sizes, are_decodes, strict=True) if is_decode)
    tokens = np.empty((4, len(places)), np.int32)
    firsts, segments, seen, begin = [0] * len(spans), [], [np.empty(0, np.int32)], 0
    for index in order:
        span, size = spans[index], sizes[index]
        end = begin + size
        tokens[0, begin:end] = -1 if isinstance(span.input, LastSampled) else span.input
        tokens[1, begin:end] = span.sequence
        tokens[2, begin:end] = np.arange(span.start, span.start + size)
        tokens[3, begin:end] = places[begins[index] : begins[index] + size]
        if not are_decodes[index]:
            segments.append(Segment(begin, end, span.start))
            seen.append(table[span.sequence, : span.start + size])
        firsts[index], begin = begin, end
    rows = [row for index, span in enumerate(spans) for row in _rows(span, firsts[index], sizes[index])]
    ordered = _NO_ROWS if state_rows is None else state_rows[:, order]
    scales = _scales([spans[index] for index in order], [sizes[index] for index in order], handles)
    return PackedSpans(tokens, num_decodes, segments, np.concatenate(seen), np.array(rows, np.int32), ordered, scales)


def pack_chunk(
    span: Span,
    start: int,
    places: NDArray[np.int32],
    table: NDArray[np.int32],
    handles: Sequence[int] = (),
    *,
    sees_ahead: bool,
) -> PackedSpans:
    """Pack a part of a media chunk, without its embedding; the arguments are those of :func:`pack`.

    Args:
        span: the span of the whole chunk.
        start: number of tokens before the part.
        places: (size,), the places of its tokens.
        sees_ahead: the tokens attend to each other; the part is the whole chunk.
    """
    size = len(places)
    packed = pack([evolve(span, start=start, input=np.zeros(size, np.int32))], [size], places, table, handles=handles)
    return evolve(packed, segments=[evolve(segment, sees_ahead=sees_ahead) for segment in packed.segments])


def _is_decode(span: Span, size: int, may_check: bool) -> bool:
    return size == 1 or (may_check and span.outputs == "all" and size <= _MAX_CHECKED)


def _scales(spans: Sequence[Span], sizes: Sequence[int], handles: Sequence[int]) -> NDArray[np.float32]:
    """Return ``PackedSpans.scales`` for spans in order of computation."""
    if not any(scale for span in spans for _, scale in span.adapter):
        return _NO_SCALES
    scales, end = np.zeros((len(handles), sum(sizes)), np.float32), 0
    for span, size in zip(spans, sizes, strict=True):
        begin, end = end, end + size
        for handle, scale in span.adapter:
            scales[handles.index(handle), begin:end] += scale
    return scales


def _pack_decodes(
    spans: Sequence[Span], places: NDArray[np.int32], state_rows: NDArray[np.int32] | None, handles: Sequence[int]
) -> PackedSpans:
    ids = [-1 if isinstance(span.input, LastSampled) else int(span.input[0]) for span in spans]
    tokens = np.array([ids, [s.sequence for s in spans], [s.start for s in spans], places], np.int32)
    order = np.argsort(-tokens[2], kind="stable")  # longest first, so that no long one is left for the end
    rows = np.empty(len(spans), np.int32)
    rows[order] = np.arange(len(spans), dtype=np.int32)
    if any(span.outputs == "none" for span in spans):
        rows = rows[[span.outputs != "none" for span in spans]]
    ordered = _NO_ROWS if state_rows is None else state_rows[:, order]
    scales = _scales([spans[index] for index in order], [1] * len(spans), handles)
    return PackedSpans(tokens[:, order], len(spans), [], _NONE, rows, ordered, scales)


def pack_by_place(
    spans: Sequence[Span],
    sizes: Sequence[int],
    places: NDArray[np.int32],
    state_rows: NDArray[np.int32],
    dump: tuple[int, int],
    handles: Sequence[int] = (),
) -> PackedSpans:
    """Pack spans that verify drafts in a model with recurrent layers: every first token, every second one, and so on.

    Args:
        spans, sizes, places, handles: see :func:`pack`.
        state_rows: (K + 1, len(spans)) with K the most tokens of a span.
        dump: slot and place of the tokens that fill up shorter spans.
    """
    num_spans, most = len(spans), len(state_rows) - 1
    tokens = np.zeros((4, most, num_spans), np.int32)
    tokens[1], tokens[3] = dump[0], dump[1]
    rows, begin = [], 0
    for index, (span, size) in enumerate(zip(spans, sizes, strict=True)):
        tokens[0, :size, index] = -1 if isinstance(span.input, LastSampled) else span.input
        tokens[1, :size, index] = span.sequence
        tokens[2, :size, index] = np.arange(span.start, span.start + size)
        tokens[3, :size, index] = places[begin : begin + size]
        rows += [place * num_spans + index for place in _rows(span, 0, size)]
        begin += size
    num_tokens, scales = most * num_spans, np.tile(_scales(spans, [1] * num_spans, handles), (1, most))
    return PackedSpans(tokens.reshape(4, -1), num_tokens, [], _NONE, np.array(rows, np.int32), state_rows, scales)


def _rows(span: Span, first: int, size: int) -> range:
    return {"none": range(0), "last": range(first + size - 1, first + size), "all": range(first, first + size)}[
        span.outputs
    ]


def flatten(packed: PackedSpans) -> tuple[NDArray[np.int32], dict[str, tuple[int, int]]]:
    """Concatenate all parts, aligned; return the array and each part's range. Columns of ``tokens`` are padded too."""
    num_tokens = packed.tokens.shape[1]
    tokens = np.zeros((4, _aligned(num_tokens)), np.int32)
    tokens[:, :num_tokens] = packed.tokens
    parts = {
        "tokens": tokens.reshape(-1),
        "lengths": packed.tokens[2, : packed.num_decodes] + 1,
        "gather": packed.gather,
        "query_ends": np.array([0, *accumulate(segment.end - segment.begin for segment in packed.segments)], np.int32),
        "key_ends": np.array([0, *accumulate(segment.stop for segment in packed.segments)], np.int32),
        "rows": packed.rows,
        "state_rows": packed.state_rows.reshape(-1),
        "scales": packed.scales.reshape(-1).view(np.int32),
        "rotary": packed.rotary_positions,
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
