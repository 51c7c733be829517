"""Checks of the files in a model's folder, before a library reads them: all shards are there, texts can be read.

Called for each folder by :mod:`enginehouse_backendkit.model_folder` and by backends that load such folders. Libraries
answer an incomplete folder with a list of tensors or with an error of their parser; here the message names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular, read_regular_text

__all__ = [
    "check_has_tokenizer",
    "check_names",
    "check_shards",
    "check_texts",
    "describe_folder",
    "has_only_tekken",
    "read_object",
]

_INDEX = "model.safetensors.index.json"
_OBJECTS = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.json")
_MAX_TEXT_BYTES = 4 * 2**20
_MAX_INDEX_BYTES = 64 * 2**20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_NUM_SHOWN = 3
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")
_TIKTOKEN_BYTES = 200
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}


def read_object(file: Path, max_bytes: int = _MAX_TEXT_BYTES) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ModelLoadError: it cannot be read, or holds something else.
    """
    try:
        data = json.loads(read_regular_text(file, max_bytes))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return data


def check_texts(folder: Path) -> None:
    """Check that the small JSON files of a folder are objects, and its templates UTF-8.

    Raises:
        ModelLoadError: names the first that is not.
    """
    for name in _OBJECTS:
        if (folder / name).is_file():
            _check_template(folder / name, read_object(folder / name).get("chat_template"))
    for file in sorted((*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja"))):
        try:
            read_regular_text(file, _MAX_TEXT_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _check_template(file: Path, template: Any) -> None:
    """Check that a template is a text, or a list of named texts."""
    named = template if isinstance(template, list) else []
    are_texts = all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in named
    )
    if not are_texts or not isinstance(template, str | list | None):
        raise ModelLoadError(f"{file}: its chat_template is not a text, nor a list of objects with name and template")


def check_shards(folder: Path) -> None:
    """Check that all safetensors files of a model are in its folder: those of the index, or by their numbers.

    Raises:
        ModelLoadError: names those that are missing, or the index cannot be read.
    """
    present = {file.name for file in folder.glob("*.safetensors") if file.exists()}
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelLoadError(f"{index} has no weight_map")
        needed = {str(name) for name in weight_map.values()}
    else:
        numbered = [match for name in present if (match := _SHARD.fullmatch(name))]
        needed = {name for match in numbered for name in _all_shards(match, len(numbered))}
    missing = sorted(needed - present)
    if missing:
        shown = ", ".join(missing[:_NUM_SHOWN]) + (", ..." if len(missing) > _NUM_SHOWN else "")
        raise ModelLoadError(f"{folder} is incomplete: {len(missing)} of {len(needed)} files are missing ({shown})")


def _all_shards(shard: re.Match[str], num_present: int) -> list[str]:
    """Return the names of the shards of the same model, some more than there are files at most."""
    stem, _, total = shard.groups()
    return [f"{stem}-{number:05}-of-{total}.safetensors" for number in range(1, min(int(total), num_present + 100) + 1)]


def check_names(folder: Path, pattern: str) -> None:
    """Check that the weights have a name by which a library finds them.

    Args:
        pattern: of the name of one of the files.

    Raises:
        ModelLoadError: gives the names.
    """
    if any(folder.glob(pattern)) or (folder / _INDEX).is_file():
        return
    found = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:_NUM_SHOWN])
    raise ModelLoadError(f"{folder}: its weights need the name {pattern}, or the file {_INDEX}; there are: {found}")


def describe_folder(folder: Path) -> str:
    """Return what a folder without ``config.json`` or safetensors is, for messages."""
    if (folder / "config.json").is_file():
        return "it has no weights (*.safetensors)"
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter (LoRA), not a model; merge the adapter into its base model"
    if (folder / "params.json").is_file():
        return "it holds a model in its publisher's own format (params.json); get it in Hugging Face's format"
    return "not a folder with config.json and safetensors"


def check_has_tokenizer(folder: Path) -> None:
    """Check that a tokenizer can be made of the files in a folder.

    Raises:
        ModelLoadError: there is none that is known, or the package that reads it is missing.
    """
    if any((folder / name).is_file() for name in _TOKENIZERS) or has_only_tekken(folder):
        return
    if any(folder.glob("*.tiktoken")) or any(map(_is_tiktoken, folder.glob("*.model"))):
        raise ModelLoadError(
            f"{folder}: its tokenizer is a tiktoken file, which says neither how texts are split nor its control "
            "tokens; copy the tokenizer.json of a model of the same family into the folder"
        )
    if not any(folder.glob("*.model")):
        raise ModelLoadError(
            f"{folder}: it has no tokenizer (tokenizer.json, tokenizer.model or tekken.json); copy it from the "
            "original model"
        )
    missing = [package for package, module in _SENTENCEPIECE.items() if not _is_installed(module)]
    if missing:
        raise ModelLoadError(
            f"{folder}: its tokenizer is a sentencepiece model; to read it, run: pip install {' '.join(missing)}"
        )


def has_only_tekken(folder: Path) -> bool:
    """True if Mistral's ``tekken.json`` is the only tokenizer of a folder."""
    others = any((folder / name).is_file() for name in _TOKENIZERS) or any(folder.glob("*.model"))
    return not others and (folder / "tekken.json").is_file()


def _is_tiktoken(file: Path) -> bool:
    """True if a file begins with a token in base64 and its rank; a sentencepiece model is binary."""
    try:
        with open_regular(file) as opened:
            return _TIKTOKEN_LINE.match(opened.read(_TIKTOKEN_BYTES)) is not None
    except OSError:
        return False


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False
