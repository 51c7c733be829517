"""Saved sequences of llamacpp: amount of llama.cpp's data that is checked, access to the data, and checkpoints.

llama.cpp refuses most invalid data by itself, but terminates the process on inconsistent positions. These are at the
beginning of its data, so the header has a checksum of that part; any values are valid for the keys and values after it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import pairwise

from enginehouse.contract.errors import StateRefused
from enginehouse_llamacpp.memory import State

__all__ = ["num_checked_bytes", "pack_checkpoints", "state_array", "unpack_checkpoints"]

_COUNT, _ENTRY = struct.Struct("<I"), struct.Struct("<IQ")
_FIRST_BYTES = 64
_CELL_BYTES = 32
"""llama.cpp writes 12 bytes per cell before the keys and values, and a few more for some models."""


def num_checked_bytes(num_tokens: int) -> int:
    """Number of bytes at the beginning of llama.cpp's data that contain everything llama.cpp relies on unchecked."""
    return _FIRST_BYTES + _CELL_BYTES * num_tokens


def state_array(data: memoryview, begin: int) -> State:
    """Return llama.cpp's data, from the byte ``begin`` on; copied only if it is read-only."""
    num_bytes = data.nbytes - begin
    if data.readonly:
        return (ctypes.c_uint8 * num_bytes).from_buffer_copy(data, begin)
    return (ctypes.c_uint8 * num_bytes).from_buffer(data, begin)


def pack_checkpoints(checkpoints: Sequence[tuple[int, State]]) -> bytes:
    """Return checkpoints, each with its length, as bytes."""
    parts = [_COUNT.pack(len(checkpoints))]
    for length, state in checkpoints:
        parts += _ENTRY.pack(length, len(state)), bytes(state)
    return b"".join(parts)


def unpack_checkpoints(data: memoryview, num_tokens: int) -> tuple[list[tuple[int, State]], int]:
    """Return the checkpoints at the beginning of ``data``, and their size in bytes.

    Raises:
        StateRefused: they are damaged, or do not fit a sequence of ``num_tokens`` tokens.
    """
    found: list[tuple[int, State]] = []
    try:
        (num_saved,) = _COUNT.unpack_from(data)
        start = _COUNT.size
        for _ in range(num_saved):
            length, num_bytes = _ENTRY.unpack_from(data, start)
            start += _ENTRY.size
            found.append((length, (ctypes.c_uint8 * num_bytes).from_buffer_copy(data, start)))
            start += num_bytes
    except (struct.error, ValueError, OverflowError) as error:
        raise StateRefused("its checkpoints are damaged") from error
    lengths = [length for length, _ in found]
    if not all(before < after for before, after in pairwise([0, *lengths, num_tokens + 1])):
        raise StateRefused("the lengths of its checkpoints do not fit the sequence")
    return found, start
