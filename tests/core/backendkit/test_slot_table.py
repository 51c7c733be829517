"""Slot bookkeeping: handles, lengths, room, and which batches may run."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from enginehouse.contract.backend import LastSampled, Outputs, RunnerCapabilities, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StateRefused
from enginehouse.contract.media import MediaChunk, MediaInput
from enginehouse_backendkit.slot_table import SlotTable

_CAPABILITIES = RunnerCapabilities(
    max_sequences=3, max_batch_tokens=12, max_context=10, cache_tokens=20, exit_layers=(4,)
)
_IMAGE = MediaInput(
    MediaChunk(num_tokens=1, num_positions=1, data=None), np.zeros(1, np.float32), np.array([-1], np.int32)
)


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(_CAPABILITIES, vocab_size=100)


def _span(sequence: int, start: int, num_tokens: int) -> Span:
    return Span(sequence, start, np.arange(num_tokens, dtype=np.int32))


def _append(table: SlotTable, sequence: int, num_tokens: int) -> None:
    span = _span(sequence, table.length(sequence), num_tokens)
    table.check([span])
    table.advance([span])


def test_open_takes_the_lowest_free_slot(table: SlotTable) -> None:
    assert [table.open(), table.open(), table.open()] == [0, 1, 2]
    table.free(1)
    assert table.open() == 1
    with pytest.raises(CacheFull):
        table.open()


def test_free_tokens_and_lengths_always_make_up_the_cache(table: SlotTable) -> None:
    first, second = table.open(), table.open()
    _append(table, first, 7)
    _append(table, second, 4)
    copy, length = table.fork(first, 5)

    assert length == table.length(copy) == 5
    assert table.free_tokens() == 20 - 7 - 4 - 5
    assert table.truncate(first, 2) == 2
    table.free(second)
    assert table.free_tokens() == 20 - 2 - 5
    assert (table.length(first), table.length(copy)) == (2, 5)
    with pytest.raises(InvalidSpan):
        table.length(second)


def test_fork_of_a_shorter_source_gives_what_there_is(table: SlotTable) -> None:
    source = table.open()
    _append(table, source, 3)

    assert table.fork(source, 8)[1] == 3
    assert table.truncate(source, 8) == 3


def test_fork_without_room_changes_nothing(table: SlotTable) -> None:
    source, other = table.open(), table.open()
    _append(table, source, 9)
    _append(table, other, 9)
    with pytest.raises(CacheFull) as caught:
        table.fork(source, 9)

    assert (caught.value.needed, caught.value.free) == (9, 2)
    assert table.length(source) == table.length(other) == 9
    assert table.fork(source, 2)[1] == 2


def test_check_refuses_a_batch_that_does_not_fit(table: SlotTable) -> None:
    sequences = [table.open() for _ in range(3)]
    for sequence in sequences[:2]:
        _append(table, sequence, 9)
    with pytest.raises(CacheFull) as caught:
        table.check([_span(sequences[0], 9, 1), _span(sequences[2], 0, 2)])

    assert (caught.value.needed, caught.value.free) == (3, 2)
    table.check([_span(sequences[0], 9, 1), _span(sequences[2], 0, 1)])


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (_span(7, 0, 1), "sequence 7 is not open"),
        (_span(0, 1, 1), "start is 1 but its length is 0"),
        (_span(0, 0, 0), "non-empty"),
        (_span(0, 0, 11), "exceed the context of 10"),
        (Span(0, 0, np.array([100], np.int32)), "outside the vocabulary of 100"),
        (Span(0, 0, np.array([-1], np.int32)), "outside the vocabulary"),
        (Span(0, 0, np.array([1.0])), "row of token ids"),
        (Span(0, 0, np.array([[1]], np.int32)), "row of token ids"),
        (Span(0, 0, LastSampled()), "needs token ids"),
        (Span(0, 0, _IMAGE), "needs token ids, not image"),
        (Span(0, 0, np.array([1], np.int32), "some"), "outputs='some' is unknown"),
        (Span(0, 0, np.array([1], np.int32), num_layers=3), "num_layers=3 is not supported"),
    ],
)
def test_check_refuses_a_wrong_span(table: SlotTable, span: Span, reason: str) -> None:
    table.open()
    with pytest.raises(InvalidSpan, match=reason):
        table.check([span])


def test_an_image_has_a_pass_of_its_own() -> None:
    """It may be larger than a pass, but not than the context, and gives no logits."""
    table = SlotTable(attrs.evolve(_CAPABILITIES, media=("image",), max_batch_tokens=4), vocab_size=100)
    table.open(), table.open()

    def image(num_tokens: int, outputs: Outputs = "none") -> Span:
        chunk = MediaChunk(num_tokens=num_tokens, num_positions=1, data=None)
        return Span(0, 0, MediaInput(chunk, _IMAGE.embedding, np.full(num_tokens, -1, np.int32)), outputs)

    assert table.check([image(10)]) == [10]
    table.advance([image(10)])
    assert table.length(0) == 10
    table.truncate(0, 0)
    for spans, reason in (
        ([image(2), _span(1, 0, 1)], "no other span"),
        ([image(2, "last")], "outputs must be none"),
        ([image(11)], "exceed the context of 10"),
    ):
        with pytest.raises(InvalidSpan, match=reason):
            table.check(spans)


def test_check_accepts_exit_layers_that_the_runner_has(table: SlotTable) -> None:
    table.check([Span(table.open(), 0, np.array([1], np.int32), num_layers=4)])


def test_spans_of_more_layers_wait_until_shallow_positions_are_gone() -> None:
    capabilities = attrs.evolve(_CAPABILITIES, exit_layers=(2, 4, 6))
    table = SlotTable(capabilities, vocab_size=100)
    sequence = table.open()

    def append(sequence: int, num_layers: int | None) -> None:
        span = Span(sequence, table.length(sequence), np.array([1], np.int32), num_layers=num_layers)
        table.check([span])
        table.advance([span])

    for num_layers in (None, 6, 4, 4, 2):
        append(sequence, num_layers)
    for num_layers in (None, 6, 4):
        with pytest.raises(InvalidSpan, match="positions from 1 on ran fewer layers"):
            append(sequence, num_layers)
    copy, _ = table.fork(sequence, 3)
    with pytest.raises(InvalidSpan, match="fewer layers"):
        append(copy, 6)
    append(copy, 4)
    table.truncate(sequence, 1)
    append(sequence, None)
    table.free(copy)
    append(table.open(), None)


def test_check_refuses_a_wrong_batch(table: SlotTable) -> None:
    first, second = table.open(), table.open()
    for batch in ([], [_span(first, 0, 1), _span(first, 1, 1)], [_span(first, 0, 7), _span(second, 0, 6)]):
        with pytest.raises(InvalidSpan):
            table.check(batch)


def test_lengths_are_never_negative(table: SlotTable) -> None:
    sequence = table.open()
    for call in (table.truncate, table.fork):
        with pytest.raises(InvalidSpan):
            call(sequence, -1)


def test_adopt_opens_a_sequence_of_saved_tokens(table: SlotTable) -> None:
    """As a fork would, of a sequence that is not here."""
    sequence = table.adopt(7)

    assert table.length(sequence) == table.saved_length(sequence) == 7
    assert table.free_tokens() == 13
    _append(table, sequence, 3)
    assert table.length(sequence) == 10


def test_adopt_refuses_what_finds_no_place(table: SlotTable) -> None:
    with pytest.raises(StateRefused, match="11 tokens"):
        table.adopt(11)
    table.adopt(10)
    table.adopt(5)
    with pytest.raises(CacheFull):
        table.adopt(6)
    table.adopt(5)
    with pytest.raises(CacheFull):
        table.adopt(0)
    assert table.free_tokens() == 0


def test_only_whole_sequences_are_saved(table: SlotTable) -> None:
    """The layers above an exit never saw its positions, and an empty sequence holds nothing."""
    sequence = table.open()
    with pytest.raises(InvalidSpan, match="nothing"):
        table.saved_length(sequence)
    _append(table, sequence, 2)
    span = attrs.evolve(_span(sequence, 2, 1), num_layers=4)
    table.check([span])
    table.advance([span])
    with pytest.raises(InvalidSpan, match="some layers"):
        table.saved_length(sequence)
    table.truncate(sequence, 2)

    assert table.saved_length(sequence) == 2
