"""Reads the metadata of a GGUF file without llama.cpp: for memory estimates before anything is loaded.

Knows the container format only, not what the keys mean to an engine. Long arrays (the vocabulary) are skipped.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path

from attrs import frozen

from enginehouse.errors import ModelLoadError

__all__ = ["GGUF_MAGIC", "GgufHeader", "Value", "is_gguf", "read_header", "shard_paths"]

GGUF_MAGIC = b"GGUF"

Value = int | float | bool | str | list[int]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_INTEGER_TYPES = {0, 1, 2, 3, 4, 5, 7, 10, 11}
_MAX_ARRAY = 4096
_MAX_SHARD_DIGITS = 5
_MAX_STRING_BYTES = 64 * 2**20


@frozen
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        path: of the file.
        values: scalar and text keys, and short arrays of integers.
        num_tensors: tensors in this file.
        file_bytes: size of all files of the model.
        vocab_size: length of the token list, 0 when there is none.
    """

    path: Path
    values: Mapping[str, Value]
    num_tensors: int
    file_bytes: int
    vocab_size: int

    @property
    def architecture(self) -> str:
        """For example ``llama``; prefix of the keys that describe the model."""
        return str(self.values.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """An integer of this architecture, for example ``block_count``."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        return int(value) if isinstance(value, int | float) else default

    def per_layer(self, key: str, num_layers: int, default: int = 0) -> list[int]:
        """An integer that may be given once or per layer, as one value per layer."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            return value[:num_layers]
        return [int(value) if isinstance(value, int | float) else default] * num_layers


def is_gguf(path: Path) -> bool:
    """Whether the file begins with GGUF's magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def shard_paths(path: Path) -> list[Path]:
    """All files of a model that was split as ``name-00001-of-00003.gguf``, in order; else just ``path``."""
    stem, _, total = path.stem.rpartition("-of-")
    base, _, number = stem.rpartition("-")
    if not (base and number.isdigit() and total.isdigit() and len(number) == len(total) <= _MAX_SHARD_DIGITS):
        return [path]
    width = len(total)
    return [path.with_name(f"{base}-{index:0{width}}-of-{total}.gguf") for index in range(1, int(total) + 1)]


def read_header(path: Path) -> GgufHeader:
    """Read the metadata of ``path``.

    Raises:
        ModelLoadError: the file cannot be read, is no GGUF file, or ends too early.
    """
    try:
        with path.open("rb") as file:
            values, num_tensors, vocab_size = _Reader(file).header()
        file_bytes = sum(shard.stat().st_size for shard in shard_paths(path))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, OverflowError) as error:
        raise ModelLoadError(f"{path}: not a valid GGUF file: {error}") from error
    return GgufHeader(path, values, num_tensors, file_bytes, vocab_size)


class _Reader:
    """A cursor over the file; raises ValueError or struct.error on anything that is not GGUF."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file

    def header(self) -> tuple[dict[str, Value], int, int]:
        """All metadata, the number of tensors and the length of the token list."""
        if self._file.read(4) != GGUF_MAGIC:
            raise ValueError("the magic bytes are missing")
        version = self._number(4)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_values = self._number(10), self._number(10)
        values: dict[str, Value] = {}
        vocab_size = 0
        for _ in range(num_values):
            key = self._text()
            kind = self._number(4)
            if kind == _ARRAY:
                length, array = self._array()
                if key == "tokenizer.ggml.tokens":
                    vocab_size = length
                if array is not None:
                    values[key] = array
            else:
                values[key] = self._text() if kind == _STRING else self._scalar(kind)
        return values, num_tensors, vocab_size

    def _array(self) -> tuple[int, list[int] | None]:
        """Length of an array, and its values when these are few integers."""
        kind, length = self._number(4), self._number(10)
        if kind == _STRING:
            for _ in range(length):
                self._skip(self._number(10))
            return length, None
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"arrays of type {kind} are not supported")
        size = struct.calcsize(layout) * length
        if kind not in _INTEGER_TYPES or length > _MAX_ARRAY:
            self._skip(size)
            return length, None
        return length, list(struct.unpack(f"<{length}{layout[1]}", self._read(size)))

    def _scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"values of type {kind} are not supported")
        value: int | float | bool = struct.unpack(layout, self._read(struct.calcsize(layout)))[0]
        return value

    def _number(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _text(self) -> str:
        length = self._number(10)
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes")
        return self._read(length).decode(errors="replace")

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise ValueError("it ends too early")
        return data

    def _skip(self, num_bytes: int) -> None:
        if num_bytes < 256:
            self._read(num_bytes)
        else:
            self._file.seek(num_bytes, 1)
