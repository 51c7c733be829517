"""Folders whose tokenizer is not a ``tokenizer.json``: read on every backend of folders, or refused by name."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import Backend, ModelSource, Runner
from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.tekken import read_tekken

TinyModel = Callable[[str], Path]

TEXTS = (
    "The capital of France is Paris.",
    "Zwölf Boxkämpfer jagen Viktor. 漢字 🧑🏽‍🚀",
    "  two spaces\n\n\ttabs, [INST] </s> <SPECIAL_25> 12345 don't",
    "",
)
WORDS = ("th", "the", " the", "er", "in", "ing", "cap", "ital", "capital", " capital", "France", "is", " is", "\n\n")
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
NUM_SPECIAL, VOCAB_SIZE = 30, 400
BACKENDS = [
    pytest.param("hf", marks=[pytest.mark.hf, pytest.mark.timeout(300)]),
    pytest.param("mlx", marks=[pytest.mark.mlx, pytest.mark.timeout(300)]),
]


def tekken(**changes: Any) -> dict[str, Any]:
    """A file with all bytes, some words, and tokens beyond those that are used."""
    tokens = [bytes([value]) for value in range(256)]
    tokens += [word.encode() for word in WORDS]
    tokens += [f"unused{number}".encode() for number in range(VOCAB_SIZE)]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(tokens)]
    named = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    config = {
        "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": VOCAB_SIZE,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v11",
    }
    return {"config": config, "vocab": vocab, "special_tokens": named, **changes}


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A model without its tokenizer."""
    made = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (made / name).unlink(missing_ok=True)
    (made / "generation_config.json").write_text("{}")
    return made


def backend(name: str) -> tuple[Backend[Any], Any]:
    if name == "hf":
        from enginehouse_hf.backend import HfBackend, HfOptions

        return HfBackend(), HfOptions(threads=1, slots=1, context=64, device="cpu")
    from enginehouse_mlx.backend import MlxBackend, MlxOptions

    return MlxBackend(), MlxOptions(slots=1, context=64)


def opened(name: str, folder: Path) -> Runner:
    opener, options = backend(name)
    return opener.open(ModelSource(str(folder), folder), options, lambda *_: None)


@pytest.mark.parametrize("name", BACKENDS)
def test_tekken_is_read(name: str, folder: Path) -> None:
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    runner = opened(name, folder)
    tokenizer = runner.tokenizer

    for text in TEXTS:
        token_ids = tokenizer.encode(text, False)
        assert b"".join(tokenizer.token_bytes[i] for i in token_ids) == text.encode()
        assert not tokenizer.control_token_ids.intersection(token_ids), "control-token strings of users are text"
    first = NUM_SPECIAL + 256
    assert tokenizer.encode(" capital", False) == [first + WORDS.index(" capital")]
    assert tokenizer.encode("things", False) == [
        first + WORDS.index("th"),
        first + WORDS.index("ing"),
        NUM_SPECIAL + 115,
    ]
    assert tokenizer.encode("[INST]a", True) == [3, NUM_SPECIAL + 97]
    assert (tokenizer.prefix_token_ids, set(tokenizer.end_token_ids)) == ((1,), {2})
    assert (runner.info.bos_token, runner.info.eos_token) == ("<s>", "</s>")
    assert set(runner.info.chat_templates) == {"default"}
    runner.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sentencepiece_model_is_read(name: str, folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "texts.txt").write_text("\n".join([*TEXTS[:2], "Once upon a time, in a land."] * 3), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    expected = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    runner = opened(name, folder)
    tokenizer = runner.tokenizer

    for text in TEXTS[:2]:
        token_ids = tokenizer.encode(text, False)
        assert token_ids == expected.encode(text)
        assert b"".join(tokenizer.token_bytes[i] for i in token_ids).strip() == text.encode()
    assert tokenizer.special_tokens["</s>"] == 2
    runner.close()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("qwen.tiktoken", "YQ== 0\n", "its tokenizer is a tiktoken file"),
        ("tokenizer.model", "IQ== 0\nIg== 1\n", "its tokenizer is a tiktoken file"),
        ("tekken.json", "{}", "tekken.json cannot be read"),
        ("README.md", "", "it has no tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(name: str, folder: Path, file: str, content: str, message: str) -> None:
    """Of some of them transformers makes a tokenizer that gives no token for any text."""
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        opened(name, folder)


def test_older_files_have_the_usual_control_tokens(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(special_tokens=None)))
    added = json.loads(read_tekken(tmp_path).text)["added_tokens"]

    assert [one["content"] for one in added][:10:3] == ["<unk>", "[INST]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
    assert [one["content"] for one in added][20:] == [f"<SPECIAL_{number}>" for number in range(20, NUM_SPECIAL)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": []}, "lacks some of the ranks 0 to 369"),
        ({"vocab": tekken()["vocab"][:300]}, "lacks some of the ranks"),
        ({"special_tokens": [{"rank": 0, "token_str": "<s>"}]}, "it has no token </s>"),
        ({"special_tokens": [{"rank": 30, "token_str": "<s>"}]}, "beyond their number"),
        ({"special_tokens": [{"rank": one, "token_str": "<s>"} for one in (0, 1)]}, "not unique"),
        ({"config": {**tekken()["config"], "default_vocab_size": 2**30}}, "its vocabulary has 1073741824 tokens"),
        ({"config": {**tekken()["config"], "default_vocab_size": 30}}, "its vocabulary has 30 tokens, 30 of them"),
        ({"config": {}}, "missing required field `pattern`"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "Invalid base64"),
        ({"vocab": [{"rank": 0, "token_bytes": "a" * 4000}, *tekken()["vocab"][1:]]}, "lacks some of the 256 bytes"),
    ],
)
def test_a_tekken_file_that_is_damaged_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(ModelLoadError, match=message):
        read_tekken(tmp_path)
