"""Spans in the order in which a GPU computes them: what is a decode, what a longer span, and where each row lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.backend import LastSampled, Outputs, Span
from enginehouse.contract.media import MediaChunk, MediaInput
from enginehouse_hf.cuda.packing import PackedSpans, Segment, are_short, flatten, pack, pack_by_place, pack_chunk

pytestmark = pytest.mark.hf

_CONTEXT = 128


def _packed(spans: Sequence[Span], handles: Sequence[int] = (), *, as_decodes: bool = False) -> PackedSpans:
    """Positions of each sequence lie in a stripe of the pool of its own, new ones included."""
    table = np.arange(8 * _CONTEXT, dtype=np.int32).reshape(8, _CONTEXT)
    sizes = [span.num_tokens for span in spans]
    places = [table[span.sequence, span.start : span.start + size] for span, size in zip(spans, sizes, strict=True)]
    return pack(spans, sizes, np.concatenate(places), table, handles=handles, as_decodes=as_decodes)


def _span(sequence: int, start: int, size: int, outputs: Outputs) -> Span:
    return Span(sequence, start, np.arange(size, dtype=np.int32) + 100 * sequence, outputs)


def test_a_token_and_its_drafts_are_decodes_of_one_sequence() -> None:
    """Each sees the keys before it, and all have logits: the step is one that graphs are recorded of."""
    packed = _packed([_span(1, 9, 4, "all"), Span(2, 30, LastSampled()), _span(3, 5, 3, "all")])

    assert packed.is_plain_decode
    assert packed.segments == []
    assert packed.num_decodes == 8
    assert packed.tokens.tolist() == [
        [-1, 100, 101, 102, 103, 300, 301, 302],
        [2, 1, 1, 1, 1, 3, 3, 3],
        [30, 9, 10, 11, 12, 5, 6, 7],
        [286, 137, 138, 139, 140, 389, 390, 391],
    ]
    assert packed.rows.tolist() == [1, 2, 3, 4, 0, 5, 6, 7]
    array, offsets = flatten(packed)
    begin, end = offsets["lengths"]
    assert array[begin:end].tolist() == [31, 10, 11, 12, 13, 6, 7, 8]


def test_drafts_beside_recurrent_layers_are_packed_by_their_place() -> None:
    """The first tokens of all sequences, then the second ones; the dump fills up shorter spans."""
    spans = [_span(1, 9, 3, "all"), Span(2, 30, LastSampled()), _span(3, 5, 2, "all")]
    rows = np.array([[4, 9, 12], [5, 10, 13], [6, 11, 14], [7, 8, 15]], np.int32)
    packed = pack_by_place(spans, [3, 1, 2], np.array([137, 138, 139, 286, 389, 390], np.int32), rows, (8, 999))

    assert packed.tokens.tolist() == [
        [100, -1, 300, 101, 0, 301, 102, 0, 0],
        [1, 2, 3, 1, 8, 3, 1, 8, 8],
        [9, 30, 5, 10, 0, 6, 11, 0, 0],
        [137, 286, 389, 138, 999, 390, 139, 999, 999],
    ]
    assert (packed.num_decodes, packed.span_tokens, packed.segments) == (9, 3, [])
    assert packed.rows.tolist() == [0, 3, 6, 1, 2, 5]


def test_by_place_each_token_uses_the_adapters_of_its_sequence() -> None:
    spans = [
        Span(1, 9, np.arange(3, dtype=np.int32), "all", adapter=((7, 0.5),)),
        Span(2, 30, np.arange(1, dtype=np.int32), "all"),
    ]
    packed = pack_by_place(spans, [3, 1], np.arange(4, dtype=np.int32), np.zeros((4, 2), np.int32), (8, 999), (6, 7))

    assert packed.scales.tolist() == [[0.0] * 6, [0.5, 0.0] * 3]


def test_tokens_after_an_image_keep_their_places() -> None:
    """Under M-RoPE their positions are less than their number: for the rotary embedding only."""
    packed = _packed([_span(1, 9, 3, "last"), Span(2, 30, LastSampled())]).shifted({1: 5})
    array, offsets = flatten(packed)
    found = {name: array[begin:end].tolist() for name, (begin, end) in offsets.items()}

    assert found["rotary"] == [30, 4, 5, 6]
    assert packed.tokens[2].tolist() == [30, 9, 10, 11]
    assert found["lengths"] == [31]
    assert [segment.start for segment in packed.segments] == [9]
    array, offsets = flatten(_packed([_span(1, 9, 3, "last")]))
    assert array[slice(*offsets["rotary"])].tolist() == [9, 10, 11]


@pytest.mark.parametrize("sees_ahead", [False, True])
def test_a_part_of_an_image_is_a_span_without_rows(sees_ahead: bool) -> None:
    table = np.arange(8 * _CONTEXT, dtype=np.int32).reshape(8, _CONTEXT)
    chunk = MediaChunk(num_tokens=6, num_positions=6, data=None)
    span = Span(1, 4, MediaInput(chunk, np.zeros(0), np.full(6, -7, np.int32)), "none", adapter=((5, 0.5),))
    packed = pack_chunk(span, 6, table[1, 6:9], table, [5], sees_ahead=sees_ahead)

    assert packed.segments == [Segment(0, 3, 6, sees_ahead)]
    assert (packed.num_decodes, packed.rows.tolist(), packed.is_plain_decode) == (0, [], False)
    assert packed.tokens.tolist() == [[0, 0, 0], [1, 1, 1], [6, 7, 8], table[1, 6:9].tolist()]
    assert packed.gather.tolist() == table[1, :9].tolist()
    assert packed.scales.tolist() == [[0.5, 0.5, 0.5]]
    last = pack_chunk(span, 9, table[1, 9:10], table, [5], sees_ahead=False)
    assert (last.num_decodes, last.rows.tolist(), last.is_plain_decode) == (1, [], False)


def test_scales_of_adapters_follow_the_tokens() -> None:
    """Decodes come first, the longest before all; an adapter is a row, and a scale of 0 is no adapter."""
    spans = [
        evolve(_span(1, 0, 3, "last"), adapter=((7, 2.0),)),
        evolve(_span(2, 4, 1, "last"), adapter=((5, 1.0), (7, 0.5))),
        _span(3, 9, 1, "last"),
    ]

    assert _packed(spans, [5, 0, 7]).scales.tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0, 0.5, 2, 2, 2]]
    assert _packed(spans[1:], [5, 0, 7]).scales.tolist() == [[0, 1], [0, 0], [0, 0.5]]
    assert _packed(spans[2:], [5, 0, 7]).scales.size == 0
    assert _packed([evolve(spans[2], adapter=((5, 0.0),))], [5]).scales.size == 0
    packed = _packed(spans, [5, 0, 7])
    array, offsets = flatten(packed)
    begin, end = offsets["scales"]
    assert array[begin:end].view(np.float32).reshape(3, 5).tolist() == packed.scales.tolist()


def test_prompts_and_long_spans_are_no_decodes() -> None:
    """Whatever of them is wanted: their attention is that of whole spans, behind the decodes."""
    packed = _packed([_span(1, 0, 70, "all"), _span(2, 3, 5, "last"), _span(3, 8, 2, "all")])

    assert not packed.is_plain_decode
    assert packed.num_decodes == 2
    assert [(segment.begin, segment.end, segment.start) for segment in packed.segments] == [(2, 7, 3), (7, 77, 0)]
    assert packed.gather.tolist() == [*range(2 * _CONTEXT, 2 * _CONTEXT + 8), *range(_CONTEXT, _CONTEXT + 70)]
    assert packed.rows.tolist() == [*range(7, 77), 6, 0, 1]


def test_in_a_recorded_step_short_spans_are_decodes_too() -> None:
    """Each token sees those before it; only the rows that are wanted are read."""
    spans = [_span(1, 0, 4, "last"), _span(2, 9, 1, "none"), _span(3, 5, 2, "all")]
    packed = _packed(spans, as_decodes=True)

    assert packed.segments == []
    assert packed.num_decodes == 7
    assert packed.tokens[:3].tolist() == [
        [200, 300, 301, 100, 101, 102, 103],
        [2, 3, 3, 1, 1, 1, 1],
        [9, 5, 6, 0, 1, 2, 3],
    ]
    assert packed.rows.tolist() == [6, 1, 2]


@pytest.mark.parametrize(
    ("shapes", "short"),
    [
        ([(9, 1, "last"), (3, 40, "all")], True),
        ([(9, 1, "last"), (3, 40, "last")], True),
        ([(0, 65, "last")], False),
        ([(0, 66, "all")], False),
        ([(1000, 65, "all")], True),  # drafts
        ([(1000, 64, "last")], False),  # 64 tokens that read a thousand keys each
        ([(960, 64, "none")], True),
        ([(960, 64, "none"), (1, 2, "none")], False),
    ],
)
def test_spans_are_short_if_their_tokens_read_little(shapes: list[tuple[int, int, Outputs]], short: bool) -> None:
    spans = [_span(sequence, *shape) for sequence, shape in enumerate(shapes)]

    assert are_short(spans, [size for _, size, _ in shapes]) == short


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 70), st.sampled_from(["none", "last", "all"])),
        min_size=1,
        max_size=8,
    )
)
def test_every_row_is_that_of_its_token(shapes: list[tuple[int, int, Outputs]]) -> None:
    spans = [_span(sequence, *shape) for sequence, shape in enumerate(shapes)]
    packed = _packed(spans)
    wanted = [
        (span.sequence, span.start + place)
        for span in spans
        for place in {"none": [], "last": [span.num_tokens - 1], "all": range(span.num_tokens)}[span.outputs]
    ]

    assert [(int(packed.tokens[1, row]), int(packed.tokens[2, row])) for row in packed.rows] == wanted
    assert packed.tokens.shape[1] == sum(span.num_tokens for span in spans)
    ends = [segment.end for segment in packed.segments]
    assert [segment.begin for segment in packed.segments] == [packed.num_decodes, *ends][: len(ends)]
    assert [*accumulate(segment.stop for segment in packed.segments)][-1:] == [len(packed.gather)][: len(ends)]


def test_some_of_the_decodes_are_taken_in_the_order_asked_for() -> None:
    packed = _packed([_span(sequence, 10 + sequence, 1, "last") for sequence in (1, 2, 3)])
    taken = packed.take(np.array([2, 0]))

    assert taken.is_plain_decode
    assert taken.tokens[1].tolist() == [packed.tokens[1, 2], packed.tokens[1, 0]]
    assert taken.rows.tolist() == [0, 1]
