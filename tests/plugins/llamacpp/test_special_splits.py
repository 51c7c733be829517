"""Texts with many special tokens: in pieces they have the tokens that they have as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse_llamacpp import special_splits
from enginehouse_llamacpp.special_splits import SpecialSplits
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

from .vocabularies import open_tokenizer

pytestmark = pytest.mark.llamacpp

RUNS = ["\n" * 31, "\n" * 32, " " * 8, "\t\t"]
NAMES = ["<td>", "<t", "</td>", "<table>", "<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<end_of_turn>", "<eos>"]
OTHERS = ["<unused7>", "<start_of_turn>user\n", "[@BOS@]", "\ud800", *"a \n\t<>|[]\u2581é漢"]
PARTS = st.sampled_from(RUNS + NAMES + OTHERS)
TEXTS = st.lists(st.tuples(PARTS, st.integers(1, 40)), max_size=12).map(lambda runs: "".join(p * n for p, n in runs))


@pytest.fixture(scope="module", params=["smollm", "gemma"])
def tokenizer(request: pytest.FixtureRequest) -> LlamaCppTokenizer:
    """Few special tokens, and 6,400 of which thousands overlap: runs of line breaks, tabs, white space."""
    path = request.getfixturevalue(f"{request.param}_path")
    assert isinstance(path, Path)
    return open_tokenizer(path)


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, special=st.booleans())
def test_pieces_have_the_tokens_of_the_whole(tokenizer: LlamaCppTokenizer, text: str, special: bool) -> None:
    """With a cut at every place that is thought to be safe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(special_splits, "TOKENS_PER_PIECE", 1)
        found = tokenizer.encode(text, special)
        patch.setattr(special_splits, "TOKENS_PER_PIECE", 10**9)
        whole = tokenizer.encode(text, special)

    assert found == whole


def test_each_control_token_and_each_long_run_is_a_place_to_cut(tokenizer: LlamaCppTokenizer) -> None:
    """So the test above cuts, and no piece grows with the text."""
    name = next(iter(tokenizer.special_tokens))

    assert len(list(tokenizer.splits[True].pieces(f"{name}a" * 320))) == 11
    if any(text.startswith("\n\n") for text in tokenizer.splits[False].strings):
        assert max(map(len, tokenizer.splits[False].pieces("\n" * 100_000))) <= 31 * 32


WORDS = st.text(alphabet="ab<>", max_size=4)


@settings(deadline=None, max_examples=500)
@given(strings=st.lists(WORDS, min_size=1, max_size=6, unique=True), text=st.text(alphabet="ab<>x", max_size=40))
def test_starts_are_those_of_a_plain_search(strings: list[str], text: str) -> None:
    """Longest first, from the left, as llama.cpp does it; whichever of equally long ones comes first."""
    for ordered in (sorted(strings, key=lambda s: (-len(s), s)), sorted(strings, key=lambda s: (-len(s), s[::-1]))):
        assert set(SpecialSplits(strings).starts(text)) <= plain_search(ordered, text)


def plain_search(ordered: list[str], text: str) -> set[int]:
    """Starts of the tokens found in ``text``."""
    gaps, starts = [(0, len(text))], set[int]()
    for string in filter(None, ordered):
        left = []
        for begin, end in gaps:
            done = begin
            while (start := text.find(string, done, end)) >= 0:
                starts.add(start)
                left.append((done, start))
                done = start + len(string)
            left.append((done, end))
        gaps = left
    return starts


def test_pieces_are_the_text() -> None:
    """Nothing is lost, whatever follows white space that a token takes along."""
    for strips in (False, True):
        splits = SpecialSplits(["<a>", "\n", "\n\n"], strips)
        text = "<a> \n\n\n\n<a>\nb" * 2000
        pieces = list(splits.pieces(text))
        assert "".join(pieces) == text
        assert len(pieces) > 10
