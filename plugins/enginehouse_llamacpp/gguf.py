"""Reads the metadata of a GGUF file without llama.cpp, for memory estimates before loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import check_regular, open_regular
from enginehouse_backendkit.gguf_reader import GGUF_MAGIC, GgufReader, Value, reading

__all__ = ["MAX_LAYERS", "GgufHeader", "is_gguf", "read_header", "shard_paths"]

_MAX_SHARD_DIGITS = 5
_MAX_COUNT = 2**32
MAX_LAYERS = 10_000
"""Upper bound for the number of layers; a value given once is repeated for each layer."""


@frozen
class GgufHeader:
    """Metadata of a GGUF file.

    Attributes:
        path: path of the file.
        values: scalars, short strings, and short integer arrays.
        num_tensors: number of tensors in this file.
        file_bytes: size of all files of the model.
        vocab_size: length of the token list, 0 if there is none.
    """

    path: Path
    values: Mapping[str, Value]
    num_tensors: int
    file_bytes: int
    vocab_size: int

    @property
    def architecture(self) -> str:
        """Architecture name, for example ``llama``; prefix of the keys that describe the model."""
        return str(self.values.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """Return an integer of this architecture, for example ``block_count``.

        Raises:
            ModelLoadError: the value is not an integer or is implausible.
        """
        value = self.values.get(f"{self.architecture}.{key}", default)
        return self._count(key, value)

    def per_layer(self, key: str, num_layers: int, default: int = 0) -> list[int]:
        """Return an integer given once or per layer as one value per layer; raises like :meth:`number`."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            return [self._count(key, one) for one in value[:num_layers]]
        return [self._count(key, value)] * num_layers

    def _count(self, key: str, value: Value) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
            raise ModelLoadError(f"{self.path}: its {key} is {str(value)[:40]!r}; the file is damaged")
        return value

    def with_layers(self, num_layers: int, file_bytes: int) -> GgufHeader:
        """Return the header of a model with the first layers of this one, in a file of another size."""
        values = {**self.values, f"{self.architecture}.block_count": num_layers}
        return evolve(self, values=values, file_bytes=file_bytes)


def is_gguf(path: Path) -> bool:
    """True if the file begins with GGUF's magic bytes."""
    try:
        with open_regular(path) as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def shard_paths(path: Path) -> list[Path]:
    """Return all files of a model split as ``name-00001-of-00003.gguf``, in order; otherwise just ``path``."""
    stem, _, total = path.stem.rpartition("-of-")
    base, _, number = stem.rpartition("-")
    if not (base and number.isdigit() and total.isdigit() and len(number) == len(total) <= _MAX_SHARD_DIGITS):
        return [path]
    width = len(total)
    return [path.with_name(f"{base}-{index:0{width}}-of-{total}.gguf") for index in range(1, int(total) + 1)]


def read_header(path: Path) -> GgufHeader:
    """Read the metadata of ``path``.

    Raises:
        ModelLoadError: the file cannot be read, is not a GGUF file, or is truncated.
    """
    values: dict[str, Value] = {}
    vocab_size = 0
    with reading(path) as file:
        reader = GgufReader(file)
        for entry in reader.entries():
            if entry.key == "tokenizer.ggml.tokens":
                vocab_size = entry.length
            if entry.value is not None:
                values[entry.key] = entry.value
    try:
        file_bytes = sum(check_regular(shard).st_size for shard in shard_paths(path))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    return GgufHeader(path, values, reader.num_tensors, file_bytes, vocab_size)
