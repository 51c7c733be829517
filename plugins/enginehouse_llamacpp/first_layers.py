"""Builds the contents of a GGUF file with only the first layers of a model. Writes nothing.

Metadata, embeddings, output norm and output are kept byte for byte; later layers are dropped, and per-layer metadata is
truncated to the remaining ones. llama.cpp cannot exit a forward pass early, so this is how it drafts with part of a
model.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular
from enginehouse_backendkit.gguf_reader import (
    ARRAY,
    GGUF_MAGIC,
    Entry,
    GgufReader,
    TensorPlace,
    Value,
    item_bytes,
    layout_of,
    reading,
)
from enginehouse_llamacpp.gguf import shard_paths

__all__ = ["FirstLayers", "count_layers", "cut_layers"]

_CHUNK_BYTES = 8 * 2**20
_ALIGNMENT = 32  # if the file does not specify one
_MAX_ALIGNMENT = 2**16
_MAX_HEADER_BYTES = 2**27
_LAYER = re.compile(r"blk\.(\d+)\.")
_SHARD_KEYS = "split."
_NOT_PER_LAYER = ("rope.dimension_sections",)  # arrays whose length may equal the number of layers by coincidence

_BY_ARCHITECTURE = {
    "baichuan": "llama.cpp derives its positions from the number of its layers",
    "hrm-text": "its layers run in cycles",
    "t5": "it has an encoder and a decoder",
    "gemma3n": "its embeddings hold a part for each layer",
}
_BY_SIZE = {
    ("gemma2", 46): "llama.cpp scales its attention by the number of its layers",
    ("gemma3", 62): "llama.cpp scales its attention by the number of its layers",
    ("exaone4", 64): "llama.cpp derives its sliding windows from the number of its layers",
}
_BY_KEY = {
    "nextn_predict_layers": "its last layers predict further tokens and are not part of the others' computation",
    "attention.shared_kv_layers": "its last layers use the keys and values of others",
    "embedding_length_per_layer_input": "its embeddings hold a part for each layer",
}


@frozen
class _ByteRange:
    """Bytes of a file, and the number of zero bytes that follow them."""

    path: Path
    begin: int
    num_bytes: int
    num_zeros: int


@frozen
class FirstLayers:
    """GGUF file with the first layers of a model.

    Attributes:
        num_layers: number of layers.
        header: everything before the tensor data.
    """

    num_layers: int
    header: bytes
    _pieces: tuple[_ByteRange, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(piece.num_bytes + piece.num_zeros for piece in self._pieces)

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes of the file in order.

        Raises:
            OSError: the model's own file cannot be read.
            ModelLoadError: the model's file was truncated in the meantime.
        """
        yield self.header
        for piece in self._pieces:
            with open_regular(piece.path) as file:
                file.seek(piece.begin)
                left = piece.num_bytes
                while left:
                    data = file.read(min(left, _CHUNK_BYTES))
                    if not data:
                        raise ModelLoadError(f"{piece.path}: it ends too early")
                    left -= len(data)
                    yield data
            if piece.num_zeros:
                yield bytes(piece.num_zeros)


def count_layers(path: Path) -> int:
    """Number of layers of the model.

    Raises:
        ModelLoadError: its file cannot be read, or cannot be cut between layers; the message says why.
    """
    return _Model.read(path).num_layers


def cut_layers(path: Path, num_layers: int) -> FirstLayers:
    """Build the file with the first ``num_layers`` layers of a model.

    Raises:
        ModelLoadError: the model does not have more than ``num_layers`` layers, or see :func:`count_layers`.
    """
    model = _Model.read(path)
    if not 0 < num_layers < model.num_layers:
        raise ModelLoadError(
            f"num_layers: {path.name} has {model.num_layers} layers, of which the first 1 to {model.num_layers - 1} "
            f"can be taken, not {num_layers}"
        )
    kept = [tensor for tensor in model.tensors if (layer := _layer_of(tensor)) is None or layer < num_layers]
    entries = [
        _without_later(entry, data, model.architecture, model.num_layers, num_layers)
        for entry, data in model.entries
        if not entry.key.startswith(_SHARD_KEYS)
    ]
    descriptions, offset = [], 0
    for tensor in kept:
        descriptions.append(tensor.place.description + struct.pack("<Q", offset))
        offset += tensor.piece.num_bytes + tensor.piece.num_zeros
    counts = struct.pack("<IQQ", model.version, len(kept), len(entries))
    header = b"".join([GGUF_MAGIC, counts, *entries, *descriptions])
    return FirstLayers(num_layers, header + bytes(-len(header) % model.alignment), tuple(one.piece for one in kept))


@frozen
class _Tensor:
    place: TensorPlace
    piece: _ByteRange


@frozen(eq=False)
class _Model:
    """Raw contents of all headers in the files of a model."""

    version: int
    architecture: str
    num_layers: int
    alignment: int
    entries: list[tuple[Entry, bytes]]
    tensors: list[_Tensor]

    @classmethod
    def read(cls, path: Path) -> _Model:
        """Read all parts of a model; raises ModelLoadError if it cannot be cut."""
        with reading(path) as file:
            reader = GgufReader(file)
            found = list(reader.entries())
            end = reader.position
            if end > _MAX_HEADER_BYTES:
                raise ValueError(f"its metadata has {end} bytes")
            file.seek(0)
            data = file.read(end)
        values = {entry.key: entry.value for entry in found if entry.value is not None}
        architecture = str(values.get("general.architecture", ""))
        num_layers = values.get(f"{architecture}.block_count")
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
            raise ModelLoadError(f"{path.name} does not say how many layers it has")
        alignment = values.get("general.alignment", _ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ModelLoadError(f"{path}: not a valid GGUF file: an alignment of {alignment}")
        reason = _reason_against(values, architecture, num_layers)
        if reason is not None:
            raise ModelLoadError(f"the first layers of {path.name} cannot be used as a model: {reason}")
        tensors = [tensor for shard in shard_paths(path) for tensor in _tensors_of(shard, alignment)]
        layers = {layer for tensor in tensors if (layer := _layer_of(tensor)) is not None}
        if len(layers) != num_layers or max(layers, default=0) >= num_layers:
            raise ModelLoadError(f"{path.name} names {num_layers} layers, but holds tensors of {len(layers)}")
        entries = [(entry, data[entry.begin : entry.end]) for entry in found]
        return cls(reader.version, architecture, num_layers, alignment, entries, tensors)


def _reason_against(values: Mapping[str, Value], architecture: str, num_layers: int) -> str | None:
    """Return the reason why the first layers cannot be used alone, or None if they can."""
    reason = _BY_ARCHITECTURE.get(architecture) or _BY_SIZE.get((architecture, num_layers))
    return reason or next((why for key, why in _BY_KEY.items() if values.get(f"{architecture}.{key}")), None)


def _tensors_of(path: Path, alignment: int) -> list[_Tensor]:
    """Return the tensors of one file; the data of each extends to the beginning of the next."""
    with reading(path) as file:
        reader = GgufReader(file)
        for _ in reader.entries():
            pass
        places = list(reader.tensors())
        data_begin = reader.position + -reader.position % alignment
        num_bytes = file.seek(0, 2) - data_begin
        bounds = [*(place.offset for place in places), num_bytes]
        if any(end <= begin for begin, end in pairwise(bounds)):
            raise ValueError("it ends too early, or its tensors are not in order")
    return [
        _Tensor(place, _ByteRange(path, data_begin + begin, end - begin, -(end - begin) % alignment))
        for place, (begin, end) in zip(places, pairwise(bounds), strict=True)
    ]


def _layer_of(tensor: _Tensor) -> int | None:
    """Layer that a tensor belongs to, or None."""
    match = _LAYER.match(tensor.place.name)
    return int(match[1]) if match else None


def _without_later(entry: Entry, data: bytes, architecture: str, num_layers: int, kept_layers: int) -> bytes:
    """Return a metadata entry as bytes, truncated to the first layers."""
    key = data[: entry.value_begin - entry.begin]
    name = entry.key.removeprefix(f"{architecture}.")
    if name == entry.key:
        return data
    if name == "block_count":
        return key + struct.pack(f"<I{layout_of(entry.kind)[1]}", entry.kind, kept_layers)
    if entry.kind == ARRAY and entry.length == num_layers and name not in _NOT_PER_LAYER:
        head = struct.pack("<IIQ", ARRAY, entry.item_kind, kept_layers)
        begin = len(key) + len(head)
        return key + head + data[begin : begin + kept_layers * item_bytes(entry.item_kind)]
    return data
