"""Writer of GGUF files, for tests and benchmarks that need a model llama.cpp can open. Knows no architecture.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little endian; the layout of ``Q8_0`` from
``block_q8_0`` in ggml-common.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["TensorType", "write_gguf"]

TensorType = Literal["f32", "f16", "q8_0"]

_UINT16, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 2, 4, 5, 6, 7, 8, 9
_LAYOUTS = {_UINT32: "I", _FLOAT32: "f", _BOOL: "?"}
_TENSOR_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
_ALIGNMENT = 32
_BLOCK = 32
"""Numbers of a block of ``Q8_0``, which share a scale."""


def write_gguf(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    types: Mapping[str, TensorType] | None = None,
) -> Path:
    """Write a file and return its path.

    Args:
        path: overwritten if it exists.
        values: text, number or boolean, or a list of one kind of these; an array of numpy's int32 for the token types,
            and numpy's uint16 and int32 for the numbers of parts, which the format wants in these widths.
        tensors: in C order; the file has their last dimension first, as the format wants.
        types: of the tensors that are not stored as float32. ``q8_0`` needs rows of a multiple of 32.
    """
    infos, blob = b"", bytearray()
    for name, data in tensors.items():
        kind = (types or {}).get(name, "f32")
        shape = struct.pack(f"<I{data.ndim}Q", data.ndim, *data.shape[::-1])
        infos += _text(name) + shape + struct.pack("<IQ", _TENSOR_TYPES[kind], len(blob))
        blob += _stored(data, kind)
        blob += bytes(-len(blob) % _ALIGNMENT)
    keys = b"".join(_text(key) + _value(item) for key, item in values.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + keys + infos
    with path.open("wb") as file:
        file.writelines((head, bytes(-len(head) % _ALIGNMENT), blob))
    return path


def _stored(data: NDArray[np.float32], kind: TensorType) -> bytes:
    if kind == "f16":
        return data.astype(np.float16).tobytes()
    if kind == "f32":
        return data.astype(np.float32).tobytes()
    blocks = data.astype(np.float32).reshape(-1, _BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    numbers = np.round(blocks / np.where(scales, scales, 1)).astype(np.int8)
    return np.hstack([scales.astype(np.float16).view(np.int8), numbers]).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(item: Any) -> bytes:
    """Type and value of a key."""
    if isinstance(item, str):
        return struct.pack("<I", _STRING) + _text(item)
    if isinstance(item, list) and isinstance(item[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(item)) + b"".join(map(_text, item))
    if isinstance(item, np.ndarray):
        return struct.pack(f"<IIQ{len(item)}i", _ARRAY, _INT32, len(item), *item)
    if isinstance(item, np.generic):
        return struct.pack("<I", _UINT16 if item.dtype == np.uint16 else _INT32) + item.tobytes()
    kind = {bool: _BOOL, float: _FLOAT32, int: _UINT32}[type(item[0] if isinstance(item, list) else item)]
    if isinstance(item, list):
        return struct.pack(f"<IIQ{len(item)}{_LAYOUTS[kind]}", _ARRAY, kind, len(item), *item)
    return struct.pack(f"<I{_LAYOUTS[kind]}", kind, item)
