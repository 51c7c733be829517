"""Saved sequences as bytes: llama.cpp's data behind a head that is checked before llama.cpp sees it.

llama.cpp refuses most wrong data by itself, but ends the process where positions do not add up. They stand at the
beginning of its data, so that part has a checksum here; the keys and values behind it are numbers like any others.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from hashlib import blake2b

from enginehouse.errors import StateRefused

__all__ = ["HEAD_BYTES", "check_state", "state_body", "write_head"]

_HEAD = struct.Struct("<4s16sIQI")
_MAGIC = b"llm1"
HEAD_BYTES = _HEAD.size

_FIRST_BYTES = 64
_CELL_BYTES = 32
"""llama.cpp writes 12 bytes per cell before the keys and values, and a few more for some models."""


def write_head(data: memoryview, state_format: str, num_tokens: int) -> None:
    """Complete the data of a sequence, whose first ``HEAD_BYTES`` are free."""
    body = data[HEAD_BYTES:]
    _HEAD.pack_into(data, 0, _MAGIC, _digest(state_format), num_tokens, body.nbytes, _checksum(body, num_tokens))


def check_state(data: memoryview, state_format: str) -> int:
    """The number of tokens that the data holds.

    Raises:
        StateRefused: it is cut short, damaged in its first part, or of other settings.
    """
    if data.nbytes < HEAD_BYTES:
        raise StateRefused("the data is shorter than its head")
    magic, settings, num_tokens, num_bytes, checksum = _HEAD.unpack(data[:HEAD_BYTES])
    body = data[HEAD_BYTES:]
    if magic != _MAGIC or body.nbytes != num_bytes or not num_tokens or checksum != _checksum(body, num_tokens):
        raise StateRefused("the data is no saved sequence, or is damaged")
    if settings != _digest(state_format):
        raise StateRefused("the sequence was saved with other settings or by another version of llama.cpp")
    return int(num_tokens)


def state_body(data: memoryview) -> ctypes.Array[ctypes.c_uint8]:
    """llama.cpp's part, copied only where it may not be written to."""
    num_bytes = data.nbytes - HEAD_BYTES
    if data.readonly:
        return (ctypes.c_uint8 * num_bytes).from_buffer_copy(data, HEAD_BYTES)
    return (ctypes.c_uint8 * num_bytes).from_buffer(data, HEAD_BYTES)


def _digest(state_format: str) -> bytes:
    return blake2b(state_format.encode(), digest_size=16).digest()


def _checksum(body: memoryview, num_tokens: int) -> int:
    return zlib.crc32(body[: _FIRST_BYTES + _CELL_BYTES * num_tokens])
