"""The suffix index against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.drafter import NUM_GRADES
from enginehouse_speculate.suffix_index import SuffixIndex, grade_of

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def longest(text: list[int], end: list[int], places: list[int]) -> int:
    def agreed(place: int) -> int:
        length = 0
        while length < min(place, len(end)) and text[place - length - 1] == end[-length - 1]:
            length += 1
        return length

    return max((agreed(place) for place in places), default=0)


@given(text=TOKENS, end=TOKENS, min_match=st.integers(1, 3))
def test_a_match_is_the_longest_among_the_last_places(text: list[int], end: list[int], min_match: int) -> None:
    index = SuffixIndex(min_match)
    index.extend(text)
    short = end[-min_match:]
    places = [p for p in range(min_match, len(text)) if text[p - min_match : p] == short and len(short) == min_match]
    match = index.find(end)

    if not places:
        assert match is None
    else:
        assert match is not None
        assert match.length == longest(text, end, places[-8:])
        assert text[match.place - match.length : match.place] == end[len(end) - match.length :]


@given(pieces=st.lists(TOKENS, max_size=5))
def test_growing_by_pieces_is_growing_at_once(pieces: list[list[int]]) -> None:
    one, other = SuffixIndex(2), SuffixIndex(2)
    for piece in pieces:
        one.extend(piece)
    other.extend(token for piece in pieces for token in piece)

    assert one.find(one.token_ids) == other.find(other.token_ids)


def test_the_end_of_a_text_is_no_place_to_go_on_from() -> None:
    index = SuffixIndex(2)
    index.extend([1, 2, 3])

    assert index.find([2, 3]) is None
    assert index.find([1, 2]) is not None


@pytest.mark.parametrize(
    ("num_agreed", "grade"), [(0, 0), (1, 0), (2, 1), (4, 2), (63, 5), (64, 6), (10_000, NUM_GRADES - 1)]
)
def test_a_grade_more_for_each_doubling(num_agreed: int, grade: int) -> None:
    assert grade_of(num_agreed) == grade
