"""The Tokenizer contract over a Hugging Face *fast* tokenizer that a backend has loaded.

Called by the backends whose libraries include such a tokenizer (``hf``, ``mlx``), once per model. Imports neither
``transformers`` nor ``tokenizers``: everything is read from the given object and its JSON form. Does not know the
source of the tokenizer, nor templates, segments or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import read_regular
from enginehouse.engine.text.segments import bytes_per_token
from enginehouse_backendkit.folder_files import read_object

__all__ = ["BYTE_LEVEL", "BackendTokenizer", "FastTokenizer", "ModelText", "chat_templates", "check_tokenizer_file"]

_TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
        "</s>",
        "<|return|>",
    }
)
"""Control tokens that end a turn by convention. Model files often name only one of several."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_MAX_FILE_BYTES = 128 * 2**20
_MAX_TOKENS = 2**22  # the largest vocabularies have about 250,000 tokens


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct):
    """The fields of ``tokenizer.json`` that are checked before its library reads it."""

    model: _Model
    added_tokens: list[_Added] = msgspec.field(default_factory=list)


def check_tokenizer_file(folder: Path) -> None:
    """Check the ids in a folder's ``tokenizer.json``, if present: its library allocates up to the largest id.

    Raises:
        ModelLoadError: it cannot be read, or an id is too large for a vocabulary.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    try:
        file = msgspec.json.decode(read_regular(path, _MAX_FILE_BYTES), type=_File)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    vocab = file.model.vocab
    ids = [len(vocab) if isinstance(vocab, list) else max(vocab.values(), default=0)]
    largest = max([*ids, *(added.id for added in file.added_tokens)])
    if largest > _MAX_TOKENS:
        raise ModelLoadError(f"{path}: a token has the id {largest}, more than {_MAX_TOKENS}")


class BackendTokenizer(Protocol):
    """The used part of ``tokenizers.Tokenizer`` (``backend_tokenizer`` of a transformers tokenizer)."""

    encode_special_tokens: bool

    def to_str(self) -> str:
        """Return the tokenizer as JSON."""
        ...

    @staticmethod
    def from_str(json: str) -> BackendTokenizer:
        """Create a tokenizer from JSON."""
        ...

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        """Return an encoding with ``ids`` and ``offsets``."""
        ...

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        """Return the mapping of tokens to ids."""
        ...


class FastTokenizer:
    """Implements ``Tokenizer``; thread-safe, since nothing changes after ``__init__``."""

    def __init__(
        self, tokenizer: BackendTokenizer, vocab_size: int, end_token_ids: Iterable[int], *, is_decoded: bool = True
    ) -> None:
        """Wrap ``tokenizer``, which is not changed.

        Args:
            tokenizer: any fast tokenizer's backend object.
            vocab_size: width of a row of logits; ids beyond it are dropped, missing ones have no bytes.
            end_token_ids: end tokens from the model's files; the conventional ones are added.
            is_decoded: ids are turned into text; False for poolers, where ``token_bytes`` only holds the spellings.

        Raises:
            ModelLoadError: the tokenizer's decoder has an unsupported type, so token bytes are unknown; or it has no
                vocabulary, as transformers makes one where it cannot read the files.
        """
        if not tokenizer.get_vocab(with_added_tokens=False):
            raise ModelLoadError("its tokenizer has an empty vocabulary")
        spec = json.loads(tokenizer.to_str())
        spec.update(truncation=None, padding=None)
        added = spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["id"] < vocab_size]
        ends = frozenset(token_id for token_id in end_token_ids if 0 <= token_id < vocab_size)
        for entry in added:
            entry["special"] |= entry["id"] in ends  # end tokens are not text
        text = json.dumps(spec)
        self._special, self._plain = type(tokenizer).from_str(text), type(tokenizer).from_str(text)
        self._plain.encode_special_tokens = True  # tokenizers' name for "control-token strings are plain text"
        self.vocab_size = vocab_size
        self.special_tokens: Mapping[str, int] = {entry["content"]: entry["id"] for entry in added if entry["special"]}
        self.end_token_ids = ends | {token_id for name, token_id in self.special_tokens.items() if name in _TURN_ENDS}
        self.control_token_ids = ends | frozenset(self.special_tokens.values())
        self.token_bytes: Sequence[bytes] = self._bytes_table(
            _byte_decoder(spec["decoder"]) if is_decoded else str.encode
        )
        self.prefix_token_ids = self._prefix()
        self.max_bytes_per_token = bytes_per_token(self.token_bytes) if _keeps_text(spec) else None

    def encode(self, text: str, special: bool) -> list[int]:
        """Return token ids without prefix. Control-token strings become control tokens only with ``special``.

        Raises:
            ValueError: the library failed on this text.
        """
        try:
            return self._encode(text, special)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            raise ValueError(f"the tokenizer's library failed: {error}") from error

    def _encode(self, text: str, special: bool) -> list[int]:
        if special:
            return list(self._special.encode(text, add_special_tokens=False).ids)
        # Ordinary pieces of a vocabulary may merge to a control token: cut the text inside each. A cut splits a
        # control-token string permanently, so this terminates; making all cuts of a round at once keeps it linear.
        pieces, token_ids = [text], list[int]()
        while pieces:
            piece = pieces.pop()
            encoding = self._plain.encode(piece, add_special_tokens=False)
            cuts = self._cuts(piece, encoding.ids, encoding.offsets)
            if cuts:
                ends = [*cuts, len(piece)]
                pieces += reversed([piece[begin:end] for begin, end in zip((0, *cuts), ends, strict=True)])
            else:
                token_ids += encoding.ids
        return token_ids

    def _cuts(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
        """Return positions inside the control-token strings of ``text`` that ordinary pieces were merged to."""
        if self.control_token_ids.isdisjoint(ids):
            return []
        return [
            begin + 1
            for token_id, (begin, end) in zip(ids, offsets, strict=True)
            if token_id in self.control_token_ids and end - begin > 1 and text[begin:end] in self.special_tokens
        ]

    def _bytes_table(self, decode: Callable[[str], bytes]) -> tuple[bytes, ...]:
        table = [b""] * self.vocab_size
        for token, token_id in self._special.get_vocab(with_added_tokens=True).items():
            if token_id < self.vocab_size:
                table[token_id] = token.encode() if token_id in self.control_token_ids else decode(token)
        return tuple(table)

    def _prefix(self) -> tuple[int, ...]:
        """Return the tokens that the post-processor puts before a text; those after it (an end token) are ignored."""
        probe = "a"
        body = self.encode(probe, True)
        whole = list(self._special.encode(probe, add_special_tokens=True).ids)
        for begin in range(len(whole) - len(body) + 1):
            if whole[begin : begin + len(body)] == body:
                return tuple(whole[:begin])
        return ()


@frozen
class ModelText:
    """Tokenizer and special tokens of a model. ``bos_token`` and ``eos_token`` are "" if undefined."""

    tokenizer: FastTokenizer
    chat_templates: dict[str, str]
    bos_token: str
    eos_token: str


def chat_templates(template: str | Mapping[str, str] | None, folder: Path) -> dict[str, str]:
    """Convert a tokenizer's ``chat_template`` (one text, or several by name) to the form of ``ModelInfo``.

    Libraries leave out ``chat_template.json``, in which older processors of images keep the template of their model.

    Raises:
        ModelLoadError: a template is not a text.
    """
    if not template and (folder / "chat_template.json").is_file():
        template = read_object(folder / "chat_template.json").get("chat_template")
        template = template if isinstance(template, str) else None
    if not template:
        return {}
    named = {"default": template} if isinstance(template, str) else dict(template)
    wrong = next((name for name, text in named.items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise ModelLoadError(f"{folder}: its chat template {wrong!r} is not a text")
    return named


def _byte_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function from a token's spelling to its bytes, as the JSON ``decoder`` decodes it mid-text."""
    steps = [] if decoder is None else list(decoder.get("decoders", [decoder]))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _decode_byte_level
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "BPEDecoder"}
    if unknown or not kinds:
        raise ModelLoadError(f"a tokenizer with the decoder {', '.join(sorted(unknown)) or 'none'} is not supported")
    replacements = [pair for step in steps for pair in _replacements(step)]

    def decode(token: str) -> bytes:
        if "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return decode


def _replacements(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return [(old, new)]
        case {"type": "Metaspace", "replacement": old}:
            return [(old, " ")]
        case {"type": "BPEDecoder", "suffix": old}:
            return [(old, " ")]
        case {"type": "Replace"}:
            raise ModelLoadError("a tokenizer whose decoder replaces by a regular expression is not supported")
    return []


def _keeps_text(spec: Mapping[str, Any]) -> bool:
    """Return True if no printable ASCII of a text is dropped before the merges."""
    if any(entry["lstrip"] or entry["rstrip"] for entry in spec["added_tokens"]):
        return False
    kinds = _kinds(spec["normalizer"], "normalizers")
    keeps = kinds <= {"NFC", "Prepend", "Replace"} and not _drops(spec["normalizer"])
    return keeps and _kinds(spec["pre_tokenizer"], "pretokenizers") <= _KEEPING


_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Sequence"})
"""Pre-tokenizers that only split a text. ``Split`` may remove the text it splits at."""


def _kinds(step: Mapping[str, Any] | None, several: str) -> frozenset[str]:
    """Return the step types of a pipeline in a tokenizer's JSON; one that removes text has a separate name."""
    if step is None:
        return frozenset()
    if several in step:
        return frozenset[str]().union(*(_kinds(part, several) for part in step[several]))
    return frozenset({f"{step['type']}{step['behavior']}" if step.get("behavior") == "Removed" else step["type"]})


def _drops(step: Mapping[str, Any] | None) -> bool:
    """Return True if a normalizer replaces anything except a single space."""
    if step is None:
        return False
    if "normalizers" in step:
        return any(map(_drops, step["normalizers"]))
    return bool(step["type"] == "Replace" and step["pattern"] != {"String": " "})


def _byte_alphabet() -> dict[str, int]:
    """Return the map from character to byte of byte-level BPE: printable Latin-1 unchanged, the rest above U+00FF.

    Source: the mapping of GPT-2's published vocabulary, which every byte-level BPE file uses.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL: Mapping[str, int] = _byte_alphabet()
"""Bytes by the characters for them in the vocabulary of a byte-level BPE."""


def _decode_byte_level(token: str) -> bytes:
    """Return the bytes of a byte-level token; a spelling outside the alphabet (an added token) is plain text."""
    try:
        return bytes(BYTE_LEVEL[character] for character in token)
    except KeyError:
        return token.encode()
