"""Small GGUF files with one-dimensional tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


LAYOUTS = {UINT32: "I", FLOAT32: "f", BOOL: "?"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value(item: Any) -> bytes:
    """Type and value of a key: a text, a number, or a list of numbers of one type."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    kind = {bool: BOOL, float: FLOAT32, int: UINT32}[type(item[0] if isinstance(item, list) else item)]
    if isinstance(item, list):
        return struct.pack(f"<IIQ{len(item)}{LAYOUTS[kind]}", ARRAY, kind, len(item), *item)
    return struct.pack(f"<I{LAYOUTS[kind]}", kind, item)


def write_gguf(path: Path, values: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """A file of one-dimensional float32 tensors."""
    infos, blob = b"", b""
    for name, data in tensors.items():
        infos += text(name) + struct.pack("<IQIQ", 1, len(data), 0, len(blob))
        blob += data.tobytes() + bytes(-data.nbytes % 32)
    keys = b"".join(text(key) + value(item) for key, item in values.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + keys + infos
    path.write_bytes(head + bytes(-len(head) % 32) + blob)
    return path


VALUES = {
    "general.architecture": "toy",
    "general.name": "Toy",
    "toy.block_count": 4,
    "toy.attention.head_count": [8, 8, 16, 16],
    "toy.attention.sliding_window_pattern": [True, True, False, True],
    "toy.xielu.beta": [0.5, 1.5, 2.5, 3.5],
    "toy.rope.dimension_sections": [11, 11, 10, 0],
    "toy.rope.scaling.factors": [1.0, 2.0, 3.0],
    "tokenizer.ggml.four_numbers": [1, 2, 3, 4],
}


def toy_tensors(num_layers: int = 4) -> dict[str, NDArray[np.float32]]:
    sizes = {"token_embd.weight": 50, "output_norm.weight": 7}
    for layer in range(num_layers):
        sizes |= {f"blk.{layer}.attn_q.weight": 9 + layer, f"blk.{layer}.ffn_up.weight": 24}
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
