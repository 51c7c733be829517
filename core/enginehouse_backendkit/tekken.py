"""Reader of ``tekken.json``, Mistral's own tokenizer file, for folders that have no ``tokenizer.json``.

Returns the JSON form of a fast tokenizer, which backends give to their library. It is a byte-level BPE without
merges: two neighbouring tokens merge if their bytes together are a token, the one of lowest rank first. The merges of
the JSON form are all pairs that make a token, in the order of its rank. Does not know chat templates.

Source: format of mistral-common 1.13 (Apache-2.0, https://github.com/mistralai/mistral-common); written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import read_regular
from enginehouse_backendkit.fast_tokenizer import BYTE_LEVEL, BackendTokenizer, FastTokenizer, ModelText
from enginehouse_backendkit.template_files import read_templates

__all__ = ["TEKKEN", "Tekken", "read_tekken", "tekken_text"]

TEKKEN = "tekken.json"

_MAX_FILE_BYTES = 128 * 2**20
_MAX_TOKENS = 2**20
_MAX_TOKEN_BYTES = 1024  # a token of n bytes has n - 1 splits
_FILLER = "<SPECIAL_{}>"
_OLDER_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Control tokens of files up to version v7, which do not list them."""


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


@frozen
class Tekken:
    """A tokenizer as a library reads it.

    Attributes:
        text: content of a ``tokenizer.json``.
        bos_token: token before a text.
        eos_token: token at the end of an answer.
        eos_token_id: its id.
    """

    text: str
    bos_token: str
    eos_token: str
    eos_token_id: int


def read_tekken(folder: Path) -> Tekken:
    """Read the file of a folder.

    Raises:
        ModelLoadError: it cannot be read, or its vocabulary has gaps or is too large.
    """
    path = folder / TEKKEN
    try:
        file = msgspec.json.decode(read_regular(path, _MAX_FILE_BYTES), type=_File)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    try:
        return _converted(file)
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def tekken_text(
    folder: Path, vocab_size: int, end_token_ids: Iterable[int], from_str: Callable[[str], BackendTokenizer]
) -> ModelText:
    """Return the tokenizer of a folder whose only tokenizer file is ``tekken.json``.

    Args:
        end_token_ids: end tokens from the model's files; that of the tokenizer is added.
        from_str: ``tokenizers.Tokenizer.from_str``.

    Raises:
        ModelLoadError: the file or the chat template cannot be read.
    """
    read = read_tekken(folder)
    tokenizer = FastTokenizer(from_str(read.text), vocab_size, [*end_token_ids, read.eos_token_id])
    return ModelText(tokenizer, read_templates(folder), read.bos_token, read.eos_token)


def _converted(file: _File) -> Tekken:
    num_special, size = file.config.default_num_special_tokens, file.config.default_vocab_size
    if not 0 < num_special < size <= _MAX_TOKENS:
        raise ValueError(f"its vocabulary has {size} tokens, {num_special} of them special")
    special = _special_tokens(file, num_special)
    ranks = _ranks(file, size - num_special)
    bos, eos = (_known(name, special) for name in ("<s>", "</s>"))
    characters = {value: character for character, value in BYTE_LEVEL.items()}
    names = {token: "".join(map(characters.__getitem__, token)) for token in ranks}
    vocab = {names[token]: rank + num_special for token, rank in ranks.items()}
    if both := next((one.token_str for one in special.values() if one.token_str in vocab), None):
        raise ValueError(f"{both!r} is both a special token and another one")
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(rank, one) for rank, one in sorted(special.items())],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": file.config.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": _begins_with("<s>", bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab | {one.token_str: rank for rank, one in special.items()},  # which gives them their ids
            "merges": _merges(ranks, names),
        },
    }
    return Tekken(json.dumps(spec), "<s>", "</s>", eos)


def _special_tokens(file: _File, num_special: int) -> dict[int, _Special]:
    """Return the control tokens by their ids; those without a name get one."""
    listed = file.special_tokens
    if listed is None:
        listed = [_Special(rank, name) for rank, name in enumerate(_OLDER_TOKENS[:num_special])]
    found = {one.rank: one for one in listed}
    if len({one.token_str for one in listed}) != len(listed) or not set(found) <= set(range(num_special)):
        raise ValueError("its special tokens are not unique, or beyond their number")
    return {rank: found.get(rank) or _Special(rank, _FILLER.format(rank)) for rank in range(num_special)}


def _ranks(file: _File, size: int) -> dict[bytes, int]:
    """Return the tokens of the vocabulary with their ranks; files hold more than are used."""
    ranks = {one.token_bytes: one.rank for one in file.vocab if one.rank < size}
    if sorted(ranks.values()) != list(range(size)):
        raise ValueError(f"its vocabulary lacks some of the ranks 0 to {size - 1}, or has some of them twice")
    if any(bytes([value]) not in ranks for value in range(256)):
        raise ValueError("its vocabulary lacks some of the 256 bytes")
    longest = max(map(len, ranks))
    if longest > _MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {longest} bytes, more than {_MAX_TOKEN_BYTES}")
    return ranks


def _known(name: str, special: Mapping[int, _Special]) -> int:
    found = next((rank for rank, one in special.items() if one.token_str == name), None)
    if found is None:
        raise ValueError(f"it has no token {name}")
    return found


def _added(rank: int, token: _Special) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": rank, "content": token.token_str, "special": token.is_control, **flags}


def _begins_with(name: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before a text."""
    token, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {name: {"id": name, "ids": [token_id], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": [token, text], "pair": [token, text], "special_tokens": known}


def _merges(ranks: Mapping[bytes, int], names: Mapping[bytes, str]) -> Sequence[tuple[str, str]]:
    """Return all pairs of tokens that make a token, in the order of its rank."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:size], token[size:]) for size in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += ((names[left], names[right]) for left, right in pairs)
    return merges
