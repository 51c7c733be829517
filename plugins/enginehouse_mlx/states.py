"""Saved sequences as bytes: core's header, then keys and values of all positions, layer by layer.

Sliding-window layers keep every position here, so a saved sequence is cut and continued like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from enginehouse.contract.errors import StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, state_body, write_head
from enginehouse_mlx.cache import SlotMemory

__all__ = ["pack_sequence", "state_format", "unpack_sequence"]


def state_format(memory: SlotMemory, metadata: Mapping[str, str]) -> str:
    """Return the format id, see :class:`enginehouse.contract.backend.StateKeeper`. The layers must have run once.

    Args:
        metadata: that of the model's information, of which library and architecture matter.
    """
    arrays = ", ".join(f"{shape} {dtype}" for shape, dtype in _forms(memory))
    computed = f"{metadata['library']}, architecture {metadata['architecture']}, {mx.default_device()}"
    return f"{computed}, keys and values of each layer: {arrays}"


def pack_sequence(memory: SlotMemory, slot: int, num_tokens: int, state_format: str) -> memoryview:
    """Return a copy of the first ``num_tokens`` positions of a slot."""
    arrays = [_as_bytes(array) for array in memory.read(slot, num_tokens)]
    mx.eval(arrays)
    data = memoryview(bytearray(HEAD_BYTES + sum(array.nbytes for array in arrays)))
    body, begin = np.frombuffer(state_body(data), np.uint8), 0
    for array in arrays:
        body[begin : begin + array.nbytes] = np.asarray(array).reshape(-1)
        begin += array.nbytes
    write_head(data, state_format, num_tokens)
    return data


def unpack_sequence(memory: SlotMemory, num_tokens: int, data: memoryview) -> Sequence[mx.array]:
    """Return the arrays from which :meth:`SlotMemory.write` fills a slot.

    Raises:
        StateRefused: the size of the data does not match ``num_tokens``.
    """
    forms = _forms(memory)
    sizes = [num_heads * num_tokens * width * dtype.size for (num_heads, width), dtype in forms]
    body = np.frombuffer(state_body(data), np.uint8)
    if body.nbytes != sum(sizes):
        raise StateRefused(f"the data holds something else than {num_tokens} tokens of this model")
    parts = np.split(body, np.cumsum(sizes)[:-1])
    return [
        mx.view(mx.array(part.reshape(num_heads, num_tokens, -1)), dtype)
        for part, ((num_heads, _), dtype) in zip(parts, forms, strict=True)
    ]


def _forms(memory: SlotMemory) -> list[tuple[tuple[int, int], mx.Dtype]]:
    """Heads, numbers per head of one position, and dtype, for the keys and the values of each layer."""
    return [((array.shape[1], array.shape[3]), array.dtype) for array in memory.arrays]


def _as_bytes(array: mx.array) -> mx.array:
    return mx.view(mx.contiguous(array), mx.uint8)
