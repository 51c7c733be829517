"""Time to tokenize grows no faster than the text, with fast tokenizers of both usual kinds; ``mlx`` uses the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse_backendkit.fast_tokenizer import FastTokenizer
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text

pytestmark = pytest.mark.hf

UNITS = {**HOSTILE_UNITS, "turns": "<end_of_turn>a", "turns only": "<end_of_turn>"}


def open_tokenizer(folder: Path, **arguments: str) -> FastTokenizer:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, **arguments)
    return FastTokenizer(loaded.backend_tokenizer, len(loaded), [loaded.eos_token_id])


def check(tokenizer: FastTokenizer, size: int) -> None:
    """Each text, as plain text and with control tokens."""
    for special in (False, True):
        for name, unit in UNITS.items():
            assert_near_linear(
                lambda size, unit=unit: hostile_text(unit, size),
                lambda text, special=special: tokenizer.encode(text, special),
                size,
                f"tokenizing {name}",
            )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tiny_tokenizers(tiny_model: Callable[[str], Path], architecture: str) -> None:
    """BPE over bytes, and with SentencePiece's underscores and byte tokens."""
    check(open_tokenizer(tiny_model(architecture)), 8_000)


def test_smollm2(smollm2_gguf: Path) -> None:
    """A real vocabulary."""
    check(open_tokenizer(smollm2_gguf.parent, gguf_file=smollm2_gguf.name), 8_000)


def test_control_tokens_that_merges_reach(tiny_model: Callable[[str], Path]) -> None:
    """Cut out of plain text in time that grows no faster than their number, and none is left."""
    tokenizer = open_tokenizer(tiny_model("llama"))
    before = tokenizer.encode("the", False)
    tokenizer.control_token_ids |= set(before)
    tokenizer.special_tokens = {**tokenizer.special_tokens, "the": 0, "th": 0, "he": 0}
    assert len(tokenizer.encode("the", False)) > len(before)

    assert_near_linear(lambda size: "the " * (size // 4), lambda text: tokenizer.encode(text, False), 8_000)
