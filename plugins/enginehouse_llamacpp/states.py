"""llamacpp's part of saved sequences: how much of llama.cpp's data is checked, and how llama.cpp gets at it.

llama.cpp refuses most wrong data by itself, but ends the process where positions do not add up. They stand at the
beginning of its data, so that part has a checksum in the head; keys and values behind it are numbers like any others.
"""

from __future__ import annotations

import ctypes

from enginehouse.contract.saved_states import HEAD_BYTES

__all__ = ["num_checked_bytes", "state_array"]

_FIRST_BYTES = 64
_CELL_BYTES = 32
"""llama.cpp writes 12 bytes per cell before the keys and values, and a few more for some models."""


def num_checked_bytes(num_tokens: int) -> int:
    """So many bytes at the beginning of llama.cpp's data hold everything that it trusts."""
    return _FIRST_BYTES + _CELL_BYTES * num_tokens


def state_array(data: memoryview) -> ctypes.Array[ctypes.c_uint8]:
    """llama.cpp's data behind the head, copied only where it may not be written to."""
    num_bytes = data.nbytes - HEAD_BYTES
    if data.readonly:
        return (ctypes.c_uint8 * num_bytes).from_buffer_copy(data, HEAD_BYTES)
    return (ctypes.c_uint8 * num_bytes).from_buffer(data, HEAD_BYTES)
