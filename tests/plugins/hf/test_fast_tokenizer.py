"""The Tokenizer contract over fast tokenizers of the two usual kinds; more of it is in the contract suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.fast_tokenizer import FastTokenizer, check_tokenizer_file

pytestmark = pytest.mark.hf

TinyModel = Callable[[str], Path]


def _load(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _changed(tokenizer: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    spec = json.loads(tokenizer.to_str())
    change(spec)
    return type(tokenizer).from_str(json.dumps(spec))


@pytest.fixture
def byte_level(tiny_model: TinyModel) -> Any:
    return _load(tiny_model("llama"))


@pytest.fixture
def sentencepiece(tiny_model: TinyModel) -> Any:
    return _load(tiny_model("gemma3"))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_token_bytes_agree_with_the_decoder(kind: str, request: pytest.FixtureRequest) -> None:
    """Every token that is whole characters decodes to the same text in tokenizers' own decoder."""
    source = request.getfixturevalue(kind)
    tokenizer = FastTokenizer(source, source.get_vocab_size(), [1])
    for token, token_id in source.get_vocab().items():
        if token_id not in tokenizer.control_token_ids:
            decoded = source.decoder.decode([token])
            assert tokenizer.token_bytes[token_id].decode(errors="replace") == decoded


def test_byte_fallback_tokens_are_single_bytes(sentencepiece: Any) -> None:
    tokenizer = FastTokenizer(sentencepiece, sentencepiece.get_vocab_size(), [])
    token_ids = tokenizer.encode("🙂", False)

    assert [tokenizer.token_bytes[token_id] for token_id in token_ids] == [bytes([b]) for b in "🙂".encode()]


def test_ids_without_a_token_have_no_bytes(byte_level: Any) -> None:
    """Models pad their vocabulary to round numbers."""
    size = byte_level.get_vocab_size()
    tokenizer = FastTokenizer(byte_level, size + 3, [1])

    assert len(tokenizer.token_bytes) == size + 3
    assert list(tokenizer.token_bytes[size:]) == [b""] * 3


def test_tokens_beyond_the_logits_are_dropped(byte_level: Any) -> None:
    """A text-only model may come with a tokenizer that also knows image tokens."""
    byte_level.add_special_tokens(["<image>"])
    size = byte_level.get_vocab_size() - 1
    tokenizer = FastTokenizer(byte_level, size, [1, size])

    assert "<image>" not in tokenizer.special_tokens
    assert max(tokenizer.encode("an <image> here", True)) < size
    assert size not in tokenizer.end_token_ids


def test_end_ids_are_those_given_and_the_conventional_ones(byte_level: Any) -> None:
    tokenizer = FastTokenizer(byte_level, byte_level.get_vocab_size(), [4])

    assert tokenizer.end_token_ids == {4, tokenizer.special_tokens["<eos>"], tokenizer.special_tokens["<end_of_turn>"]}


def test_an_end_token_is_a_control_token_even_if_its_file_says_otherwise(byte_level: Any) -> None:
    def make_plain(spec: dict[str, Any]) -> None:
        for entry in spec["added_tokens"]:
            entry["special"] = False

    source = _changed(byte_level, make_plain)
    tokenizer = FastTokenizer(source, source.get_vocab_size(), [2])

    assert tokenizer.control_token_ids == {2}
    assert 2 not in tokenizer.encode("x<end_of_turn>", False)
    assert 2 in tokenizer.encode("x<end_of_turn>", True)


def test_user_text_reaches_no_control_token_by_merging(sentencepiece: Any) -> None:
    """Converted vocabularies can hold merges that build a control token from ordinary pieces."""

    def add_merges(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        for piece in ("<", "e", "o", "s", ">", "<e", "<eo", "<eos"):
            vocab.setdefault(piece, len(vocab))
        spec["model"]["merges"] += [["<", "e"], ["<e", "o"], ["<eo", "s"], ["<eos", ">"]]

    source = _changed(sentencepiece, add_merges)
    tokenizer = FastTokenizer(source, source.get_vocab_size(), [])
    assert tokenizer.special_tokens["<eos>"] in type(source).encode(tokenizer._plain, "<eos>").ids
    token_ids = tokenizer.encode("a<eos>b<eos>", False)

    assert not tokenizer.control_token_ids & set(token_ids)
    assert b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids) == b"a<eos>b<eos>"


def test_prefix_is_what_the_post_processor_adds_in_front(byte_level: Any) -> None:
    def end_too(spec: dict[str, Any]) -> None:
        single = spec["post_processor"]["single"]
        spec["post_processor"]["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
        single.append({"SpecialToken": {"id": "<eos>", "type_id": 0}})

    def nothing(spec: dict[str, Any]) -> None:
        spec["post_processor"] = None

    for change, prefix in ((end_too, (4,)), (nothing, ())):
        source = _changed(byte_level, change)
        assert FastTokenizer(source, source.get_vocab_size(), []).prefix_token_ids == prefix


def test_the_source_is_not_changed(byte_level: Any) -> None:
    byte_level.enable_truncation(2)
    before = byte_level.to_str()
    tokenizer = FastTokenizer(byte_level, byte_level.get_vocab_size(), [4])

    assert len(tokenizer.encode("many more than two tokens", False)) > 2
    assert byte_level.to_str() == before
    assert not byte_level.encode_special_tokens


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_unknown_decoders_are_refused(byte_level: Any, decoder: dict[str, Any] | None) -> None:
    source = _changed(byte_level, lambda spec: spec.update(decoder=decoder))
    with pytest.raises(ModelLoadError, match="decoder"):
        FastTokenizer(source, source.get_vocab_size(), [])


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, "▁the", b" the"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "the</w>", b"the "),
    ],
)
def test_other_spellings_of_a_space(byte_level: Any, decoder: dict[str, Any], token: str, expected: bytes) -> None:
    def change(spec: dict[str, Any]) -> None:
        spec["decoder"] = decoder
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])

    source = _changed(byte_level, change)
    tokenizer = FastTokenizer(source, source.get_vocab_size(), [])

    assert tokenizer.token_bytes[source.token_to_id(token)] == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["model"]["vocab"].update(a=2**31),
        lambda spec: spec["added_tokens"][0].update(id=2**32 - 1),
        lambda spec: spec["model"]["vocab"].update(a="x"),
        lambda spec: spec.pop("model"),
        lambda spec: spec.update(added_tokens=5),
    ],
    ids=["id_of_a_token", "id_of_an_added_token", "no_id", "no_model", "no_tokens"],
)
def test_a_file_with_ids_that_no_vocabulary_has_is_refused(
    tiny_model: TinyModel, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """The library counts up to the largest id, with memory for each."""
    check_tokenizer_file(tiny_model("llama"))
    spec = json.loads((tiny_model("llama") / "tokenizer.json").read_text(encoding="utf-8"))
    change(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        check_tokenizer_file(tmp_path)
