"""Time to find sentences and what says nothing grows no faster than the text."""

from __future__ import annotations

import pytest

from enginehouse_compress.relevance import rate_by_words
from enginehouse_compress.sentences import split_sentences
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text

from .harness import compress

pytestmark = pytest.mark.compress


@pytest.mark.parametrize("unit", HOSTILE_UNITS.values(), ids=HOSTILE_UNITS)
def test_compression(unit: str) -> None:
    """Of a text, and of one that ends as a sentence does."""
    for end in ("", ". And"):

        def make(size: int, end: str = end) -> str:
            return hostile_text(unit, size) + end

        assert_near_linear(make, split_sentences, 10_000, "finding sentences")
        assert_near_linear(make, compress, 10_000, "lossless compression")
        assert_near_linear(make, lambda text: rate_by_words([text, "a"], text, "en"), 10_000, "rating by words")


def test_many_sentences() -> None:
    """Instead of one long one."""
    assert_near_linear(
        lambda size: [f"This is sentence {number}." for number in range(size)],
        lambda sentences: rate_by_words(sentences, "Which sentence is number 7?", "en"),
        1000,
    )
