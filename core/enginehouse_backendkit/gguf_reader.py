"""Reader of the GGUF container format: key-value pairs, then tensor descriptions, with file offsets.

For backends, which estimate memory in the server process, so the amount of data read and kept is bounded. Knows the
binary format, not the meaning of keys. Long strings and arrays (the vocabulary) are skipped.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular

__all__ = [
    "ARRAY",
    "GGUF_MAGIC",
    "Entry",
    "GgufReader",
    "TensorPlace",
    "Value",
    "check_gguf",
    "item_bytes",
    "layout_of",
    "reading",
    "repeated_text",
]

GGUF_MAGIC = b"GGUF"
ARRAY = 9

Value = int | float | bool | str | list[int]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_INTEGER_TYPES = {0, 1, 2, 3, 4, 5, 7, 10, 11}
_MAX_ARRAY = 4096
_MAX_NAME_BYTES = 65535
_MAX_TEXT_BYTES = 4 * 2**20
_MAX_KEPT_BYTES = 8 * 2**20
_MAX_METADATA_BYTES = (
    256 * 2**20
)  # libraries keep all of it in memory; large vocabularies have less than a tenth of that
_MAX_ENTRIES = 65536
_MAX_TENSORS = 2**18
_MAX_TEXTS = 2**21  # over all arrays; the largest vocabularies have less than half of that, merges included
_MAX_DIMENSIONS = 8
_READ_BYTES = 256  # reading fewer bytes is faster than seeking


@frozen
class Entry:
    """One key-value pair and its position in the file.

    Attributes:
        kind: number of the value's type; for ``ARRAY``, ``item_kind`` is the type of its items.
        value: None for long strings, and for arrays that are long or not of integers.
        length: number of items of an array; 1 for all other values.
        begin, value_begin, end: file offsets of the key, of the type number, and of the first byte after the value.
    """

    key: str
    kind: int
    item_kind: int
    value: Value | None
    length: int
    begin: int
    value_begin: int
    end: int


@frozen
class TensorPlace:
    """Description of one tensor in the file.

    Attributes:
        description: name, shape and type as stored in the file.
        offset: of its data, relative to the start of the data section.
    """

    name: str
    description: bytes
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in ggml's order, the innermost one first."""
        (name_bytes,) = struct.unpack_from("<Q", self.description)
        (num_dimensions,) = struct.unpack_from("<I", self.description, 8 + name_bytes)
        return struct.unpack_from(f"<{num_dimensions}Q", self.description, 12 + name_bytes)

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor: the product of its dimensions."""
        return math.prod(self.shape)


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open the file for reading; errors of its format become a ModelLoadError that names it.

    Raises:
        ModelLoadError: the file cannot be read, is not a GGUF file, or is truncated.
    """
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, OverflowError) as error:
        said = "it ends too early" if isinstance(error, struct.error) else error
        raise ModelLoadError(f"{path}: not a valid GGUF file: {said}") from error


def check_gguf(path: Path) -> None:
    """Read all metadata of a file, before a library without limits reads it.

    Raises:
        ModelLoadError: see :func:`reading`, or the file exceeds a limit.
    """
    with reading(path) as file:
        reader = GgufReader(file)
        for _ in reader.entries():
            pass
        for _ in reader.tensors():
            pass


def repeated_text(path: Path, key: str) -> str | None:
    """Return the first text that a file's array of texts has twice; None if there is none. Empty texts do not count.

    Raises:
        ModelLoadError: see :func:`reading`.
    """
    with reading(path) as file:
        for entry in GgufReader(file).entries():
            if entry.key != key or (entry.kind, entry.item_kind) != (ARRAY, _STRING):
                continue
            file.seek(entry.value_begin + 16)  # the types of value and items, and their number
            data = file.read(entry.end - entry.value_begin - 16)
            size, offset, seen = struct.Struct("<Q"), 0, set[bytes]()
            for _ in range(entry.length):
                begin = offset + size.size
                offset = begin + size.unpack_from(data, offset)[0]
                text = data[begin:offset]
                if text in seen:
                    return text.decode(errors="replace")
                if text:
                    seen.add(text)
            return None
    return None


def layout_of(kind: int) -> str:
    """Return the ``struct`` format of a number of this type. Raises ValueError for any other type."""
    layout = _SCALARS.get(kind)
    if layout is None:
        raise ValueError(f"values of type {kind} are not supported")
    return layout


def item_bytes(kind: int) -> int:
    """Size of a number of this type in bytes."""
    return struct.calcsize(layout_of(kind))


class GgufReader:
    """A cursor over a file. Raises ValueError or struct.error if it is not valid GGUF or exceeds a limit.

    Attributes:
        version: of the format.
        num_tensors: number of tensors that the file claims to hold.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        if file.read(4) != GGUF_MAGIC:
            raise ValueError("the magic bytes are missing")
        self.version = self._number(4)
        if self.version not in (2, 3):
            raise ValueError(f"version {self.version} is not supported")
        self.num_tensors, self._num_entries = self._number(10), self._number(10)
        if self.num_tensors > _MAX_TENSORS or self._num_entries > _MAX_ENTRIES:
            raise ValueError(f"it claims to hold {self.num_tensors} tensors and {self._num_entries} values")
        self._num_bytes = os.fstat(file.fileno()).st_size
        self._num_kept_bytes = self._num_texts = 0

    @property
    def position(self) -> int:
        """File offset of the next byte to be read."""
        return self._file.tell()

    def entries(self) -> Iterator[Entry]:
        """Yield all key-value pairs; call it once, before :meth:`tensors`."""
        for _ in range(self._num_entries):
            begin = self._file.tell()
            key = self._name()
            value_begin = self._file.tell()
            kind = item_kind = self._number(4)
            value: Value | None
            if kind == ARRAY:
                item_kind, length, value = self._array()
            else:
                length, value = 1, self._text() if kind == _STRING else self._scalar(kind)
            if self._file.tell() > self._num_bytes:
                raise ValueError("it ends too early")
            if self._file.tell() > _MAX_METADATA_BYTES:
                raise ValueError(f"its values have more than {_MAX_METADATA_BYTES} bytes")
            yield Entry(key, kind, item_kind, value, length, begin, value_begin, self._file.tell())

    def tensors(self) -> Iterator[TensorPlace]:
        """Yield the description of each tensor; call it once, after :meth:`entries`."""
        for _ in range(self.num_tensors):
            begin = self._file.tell()
            name = self._name()
            num_dimensions = self._number(4)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"the tensor {name!r} has {num_dimensions} dimensions")
            self._read(8 * num_dimensions + 4)
            end = self._file.tell()
            offset = self._number(10)
            self._file.seek(begin)
            yield TensorPlace(name, self._read(end - begin), offset)
            self._file.seek(end + 8)

    def _array(self) -> tuple[int, int, list[int] | None]:
        """Return type and number of an array's items, and the items if they are few and integers."""
        kind, length = self._number(4), self._number(10)
        if kind == _STRING:
            self._num_texts += length
            if self._num_texts > _MAX_TEXTS:
                raise ValueError(f"its arrays hold more than {_MAX_TEXTS} texts")
            self._skip_texts(length)
            return kind, length, None
        if kind not in _SCALARS:
            raise ValueError(f"arrays of type {kind} are not supported")
        size = item_bytes(kind) * length
        if kind not in _INTEGER_TYPES or length > _MAX_ARRAY:
            self._skip(size)
            return kind, length, None
        self._keep(8 * length)
        return kind, length, list(struct.unpack(f"<{length}{_SCALARS[kind][1]}", self._read(size)))

    def _scalar(self, kind: int) -> int | float | bool:
        layout = layout_of(kind)
        value: int | float | bool = struct.unpack(layout, self._read(struct.calcsize(layout)))[0]
        return value

    def _number(self, kind: int) -> int:
        return int(self._scalar(kind))

    def _name(self) -> str:
        length = self._number(10)
        if length > _MAX_NAME_BYTES:
            raise ValueError(f"a name of {length} bytes")
        self._keep(length)
        return self._read(length).decode(errors="replace")

    def _text(self) -> str | None:
        """Return a string value, or None (skipped) if it is long: some files hold a whole tokenizer.json."""
        length = self._number(10)
        if length > _MAX_TEXT_BYTES:
            self._skip(length)
            return None
        self._keep(length)
        return self._read(length).decode(errors="replace")

    def _keep(self, num_bytes: int) -> None:
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > _MAX_KEPT_BYTES:
            raise ValueError(f"its names, texts and short arrays have more than {_MAX_KEPT_BYTES} bytes")

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise ValueError("it ends too early")
        return data

    def _skip_texts(self, count: int) -> None:
        """Skip strings. The vocabulary is most of the data read from a file, so this loop is kept minimal."""
        read, unpack = self._file.read, struct.Struct("<Q").unpack
        for _ in range(count):
            (length,) = unpack(read(8))
            if length < _READ_BYTES:
                read(length)
            else:
                self._skip(length)

    def _skip(self, num_bytes: int) -> None:
        if num_bytes < _READ_BYTES:
            self._read(num_bytes)
        else:
            end = self._file.tell() + num_bytes
            if end > self._num_bytes:
                raise ValueError("it ends too early")
            self._file.seek(end)
