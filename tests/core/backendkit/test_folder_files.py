"""Incomplete and unreadable model folders: the message names the file, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit import folder_files
from enginehouse_backendkit.fast_tokenizer import chat_templates
from enginehouse_backendkit.folder_files import check_has_tokenizer, check_names
from enginehouse_backendkit.model_folder import ModelFolder, no_folder

CONFIG = {"config.json": "{}"}
WEIGHTS = {**CONFIG, "model.safetensors": ""}
INDEX = "model.safetensors.index.json"
SHARDS = {name: name for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")}
WEIGHT_MAP = {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"}


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (SHARDS, "is incomplete: 1 of 3 files are missing (model-00002-of-00003.safetensors)"),
        (
            {**SHARDS, INDEX: json.dumps({"weight_map": WEIGHT_MAP})},
            "is incomplete: 1 of 2 files are missing (model-00002-of-00003.safetensors)",
        ),
        ({"model-00001-of-99999.safetensors": ""}, "of 101 files are missing (model-00002-of-99999.safetensors, "),
        ({"model.safetensors": "", INDEX: "{"}, f"{INDEX} cannot be read: "),
        ({"model.safetensors": "", INDEX: "{}"}, f"{INDEX} has no weight_map"),
        ({"model.safetensors": "", "config.json": "[]"}, "config.json is not a JSON object"),
        ({"model.safetensors": "", "tokenizer_config.json": "[]"}, "tokenizer_config.json is not a JSON object"),
        ({"model.safetensors": "", "tokenizer_config.json": '{"chat_template": 5}'}, "its chat_template is not a text"),
        (
            {"model.safetensors": "", "tokenizer_config.json": '{"chat_template": [{"template": "x"}]}'},
            "nor a list of objects with name and template",
        ),
        ({"model.safetensors": "", "generation_config.json": "{"}, "generation_config.json cannot be read: "),
        ({"model.safetensors": "", "special_tokens_map.json": "["}, "special_tokens_map.json cannot be read: "),
        ({"model.safetensors": "", "chat_template.json": b"\xff\xfe"}, "chat_template.json cannot be read: "),
        ({"model.safetensors": "", "chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja cannot be read: 'utf-8'"),
        ({"model.safetensors": "", "additional_chat_templates/x.jinja": b"\xff"}, "x.jinja cannot be read: 'utf-8'"),
    ],
)
def test_files_that_are_missing_or_unreadable_are_named(
    tmp_path: Path, files: dict[str, str | bytes], message: str
) -> None:
    folder = write(tmp_path, {**CONFIG, **files})
    with pytest.raises(ModelLoadError) as caught:
        ModelFolder.find(ModelSource(str(folder), folder))

    assert message in caught.value.message


@pytest.mark.parametrize(
    "files", [{"model.safetensors": ""}, {**SHARDS, INDEX: json.dumps({"weight_map": {"a": next(iter(SHARDS))}})}]
)
def test_complete_folders_are_found(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    folder = write(tmp_path, {**CONFIG, **files})

    assert ModelFolder.find(ModelSource(str(folder), folder)) is not None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "not a folder with config.json and safetensors"),
        (CONFIG, "it has no weights (*.safetensors)"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "it holds an adapter (LoRA), not a model"),
        ({"params.json": "{}", "consolidated.safetensors": ""}, "in its publisher's own format (params.json)"),
    ],
)
def test_other_folders_are_described(tmp_path: Path, files: dict[str, str | bytes], reason: str) -> None:
    folder = write(tmp_path, files)

    assert reason in no_folder(ModelSource(str(folder), folder))
    assert no_folder(ModelSource("nowhere")) == "not a folder with config.json and safetensors"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it has no tokenizer (tokenizer.json, tokenizer.model or tekken.json)"),
        ({"tekken.json": "{}"}, None),
        ({"qwen.tiktoken": "{}"}, "its tokenizer is a tiktoken file"),
        ({"tokenizer.model": "YQ== 0\n"}, "its tokenizer is a tiktoken file"),
        ({"tokenizer.json": "{}"}, None),
        ({"tokenizer.json": "{}", "tekken.json": "{}"}, None),
        ({"vocab.json": "{}", "merges.txt": ""}, None),
    ],
)
def test_tokenizers_that_nothing_reads_are_named(
    tmp_path: Path, files: dict[str, str | bytes], message: str | None
) -> None:
    assert _refusal(lambda: check_has_tokenizer(write(tmp_path, files)), message)


def test_sentencepiece_models_need_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {"tokenizer.model": ""})
    for installed, message in (
        (("sentencepiece", "google.protobuf"), None),
        (("sentencepiece",), "to read it, run: pip install protobuf"),
        ((), "to read it, run: pip install sentencepiece protobuf"),
    ):
        monkeypatch.setattr(folder_files, "find_spec", lambda name, there=installed: name if name in there else None)
        assert _refusal(lambda: check_has_tokenizer(folder), message)


def test_weights_need_a_name_that_libraries_look_for(tmp_path: Path) -> None:
    folder = write(tmp_path, {"weights.00.safetensors": ""})

    assert _refusal(lambda: check_names(folder, "model.safetensors"), "its weights need the name model.safetensors")
    assert _refusal(lambda: check_names(folder, "weights*"), None)
    write(folder, {INDEX: "{}"})
    assert _refusal(lambda: check_names(folder, "model.safetensors"), None)


def _refusal(check: Callable[[], None], message: str | None) -> bool:
    """True if the check fails with this message; with None, if it does not fail."""
    try:
        check()
    except ModelLoadError as error:
        return message is not None and message in error.message
    return message is None


def test_templates_have_names_and_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    assert chat_templates(None, tmp_path) == {}
    assert chat_templates("text", tmp_path) == {"default": "text"}
    assert chat_templates({"default": "a", "tool_use": "b"}, tmp_path) == {"default": "a", "tool_use": "b"}
    for content, expected in (({"chat_template": "c"}, {"default": "c"}), ({"chat_template": 5}, {}), ({}, {})):
        written: dict[str, Any] = {"chat_template.json": json.dumps(content)}
        write(tmp_path, written)
        assert chat_templates(None, tmp_path) == expected
        assert chat_templates("text", tmp_path) == {"default": "text"}
