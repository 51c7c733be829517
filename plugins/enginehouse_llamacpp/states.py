"""Saved sequences of llamacpp: amount of llama.cpp's data that is checked, and access to the data.

llama.cpp refuses most invalid data by itself, but terminates the process on inconsistent positions. These are at the
beginning of its data, so the header has a checksum of that part; any values are valid for the keys and values after it.
"""

from __future__ import annotations

import ctypes

__all__ = ["num_checked_bytes", "state_array"]

_FIRST_BYTES = 64
_CELL_BYTES = 32
"""llama.cpp writes 12 bytes per cell before the keys and values, and a few more for some models."""


def num_checked_bytes(num_tokens: int) -> int:
    """Number of bytes at the beginning of llama.cpp's data that contain everything llama.cpp relies on unchecked."""
    return _FIRST_BYTES + _CELL_BYTES * num_tokens


def state_array(data: memoryview, begin: int) -> ctypes.Array[ctypes.c_uint8]:
    """Return llama.cpp's data, from the byte ``begin`` on; copied only if it is read-only."""
    num_bytes = data.nbytes - begin
    if data.readonly:
        return (ctypes.c_uint8 * num_bytes).from_buffer_copy(data, begin)
    return (ctypes.c_uint8 * num_bytes).from_buffer(data, begin)
