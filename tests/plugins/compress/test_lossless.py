"""Only what says nothing goes: white space in prose, and paragraphs that stand there already."""

from __future__ import annotations

import pytest

from enginehouse.contract.compressor import CompressibleText, CompressionTask, cut
from enginehouse_compress.lossless import LosslessCompressor
from enginehouse_testkit.fake_compression import FakeCompressionTools

from .harness import compress

LONG = "This paragraph is long enough to be known again when it comes back."


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("two   words", "two words"),
        ("end of line   \nnext", "end of line\nnext"),
        ("one\n\n\n\n\ntwo", "one\n\ntwo"),
        ("one\n \n\t\n \ntwo", "one\n\ntwo"),
        (f"{LONG}\n\nBetween.\n\n{LONG}\n\nEnd.", f"{LONG}\n\nBetween.\n\nEnd."),
        (f"{LONG}\n\nBetween.\n\n{LONG.replace(' ', '  ', 3)}", f"{LONG}\n\nBetween.\n\n"),
    ],
)
def test_what_says_nothing_goes(text: str, left: str) -> None:
    assert compress(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return  1",  # indented
        "| a   | b   |",
        "name\t\tvalue",
        'he wrote "two  words" there',
        "x  =  {1:  2}",
        "run `ls  -l` now",
        "- item   one",
        "Heading\n\nText.\n\nHeading\n\nOther text.",  # short paragraphs may well stand twice
        "a\n\nb",
    ],
)
def test_what_may_mean_something_stays(text: str) -> None:
    assert compress(text) == text


def test_what_is_protected_stays_as_it_is() -> None:
    text = "one   two   three"

    assert compress(text, ((3, 6),)) == "one   two three"


def test_repeated_text_of_other_messages_stays() -> None:
    """Who says it may matter."""
    texts = tuple(CompressibleText(text=LONG) for _ in range(2))
    task = CompressionTask(texts=texts, question="", max_tokens=0)
    kept = LosslessCompressor().compress(task, FakeCompressionTools())

    assert [cut(text, ranges) for text, ranges in zip(texts, kept, strict=True)] == [LONG, LONG]
