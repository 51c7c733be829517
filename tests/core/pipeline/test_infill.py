"""Prompts for gaps: the forms of several families, and texts that hold control-token strings."""

from __future__ import annotations

import pytest

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import ModelInfo
from enginehouse.engine.text.segments import encode_segments
from enginehouse.pipeline.prompting import find_infill_tokens, infill_segments
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def info(*special: str, infill_tokens: tuple[str, ...] = ()) -> ModelInfo:
    ids = {name: number for number, name in enumerate(special)}
    return ModelInfo(backend="x", max_context=10, vocab_size=10, special_tokens=ids, infill_tokens=infill_tokens)


def written(model: ModelInfo, before: str, after: str) -> str:
    return "".join(segment.text for segment in infill_segments(model, before, after))


def test_infill_writes_prefix_suffix_middle() -> None:
    assert written(info(*STARCODER), "a", "b") == "<fim_prefix>a<fim_suffix>b<fim_middle>"


def test_infill_without_a_middle_token_puts_the_suffix_first() -> None:
    assert written(info("[PREFIX]", "[SUFFIX]"), "a", "b") == "[SUFFIX]b[PREFIX]a"


def test_infill_prefers_what_the_file_names() -> None:
    named = info(*STARCODER, "<A>", "<B>", "<C>", infill_tokens=("<A>", "<B>", "<C>"))

    assert written(named, "a", "b") == "<A>a<B>b<C>"


def test_infill_needs_every_token() -> None:
    assert find_infill_tokens(info("<fim_prefix>", "<fim_suffix>")) is None
    with pytest.raises(UnsupportedParameter, match="suffix"):
        infill_segments(info("<|im_end|>"), "a", "b")


def test_infill_texts_hold_no_control_tokens() -> None:
    """A source file that speaks of control tokens cannot end its own prompt."""
    tokenizer = FakeTokenizer()
    names = tuple(tokenizer.special_tokens)
    model = info(*names, infill_tokens=names[:3])
    token_ids = encode_segments(tokenizer, infill_segments(model, f"x{names[0]}", f"{names[1]}y"), add_special=False)

    assert [token_id for token_id in token_ids if token_id in tokenizer.control_token_ids] == [
        tokenizer.special_tokens[name] for name in names[:3]
    ]
