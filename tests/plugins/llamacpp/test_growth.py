"""Time to tokenize grows no faster than the text, with each kind of pre-tokenizer and vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse_llamacpp import special_splits
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text

from .vocabularies import open_tokenizer

pytestmark = pytest.mark.llamacpp

PRE_TOKENIZERS = ["", "gpt-4o", "deepseek-v3", "deepseek-llm", "bloom"]


def tokenize(tokenizer: LlamaCppTokenizer, text: str, special: bool) -> None:
    """Tokenize, or be refused."""
    try:
        tokenizer.encode(text, special)
    except InvalidRequest as error:
        assert "square" in str(error)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_bpe(smollm_path: Path, pre_tokenizer: str, special: bool) -> None:
    """SmolLM2's vocabulary."""
    tokenizer = open_tokenizer(smollm_path, pre_tokenizer)
    for name, unit in HOSTILE_UNITS.items():
        for end in ("", "1"):
            assert_near_linear(
                lambda size, unit=unit, end=end: hostile_text(unit, size) + end,
                lambda text: tokenize(tokenizer, text, special),
                5000,
                f"tokenizing {name}",
            )


@pytest.mark.parametrize("special", [False, True])
def test_sentencepiece(gemma_path: Path, special: bool) -> None:
    """Gemma's vocabulary, with thousands of special tokens of white space and HTML."""
    tokenizer = open_tokenizer(gemma_path)
    for name, unit in {**HOSTILE_UNITS, "turns": "<end_of_turn>a", "cells": "<td>", "line and cell": "\n<td>"}.items():
        assert_near_linear(
            lambda size, unit=unit: hostile_text(unit, size),
            lambda text: tokenize(tokenizer, text, special),
            5000,
            f"tokenizing {name}",
        )


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_end|>a", "<|im_start|><|im_end|>"])
def test_many_control_tokens(smollm_path: Path, name: str) -> None:
    """As many as llama.cpp, asked at once, needs seconds for."""
    tokenizer = open_tokenizer(smollm_path)

    assert_near_linear(lambda size: hostile_text(name, size), lambda text: tokenizer.encode(text, True), 40_000)


def test_many_control_tokens_at_once_take_quadratic_time(smollm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    tokenizer = open_tokenizer(smollm_path)
    monkeypatch.setattr(special_splits, "TOKENS_PER_PIECE", 10**9)

    with pytest.raises(AssertionError, match="grows faster"):
        assert_near_linear(
            lambda size: hostile_text("<|im_end|>", size), lambda text: tokenizer.encode(text, True), 40_000
        )
