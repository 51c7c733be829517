"""Serialized sequences: the header at the start of every runner's data, and its validation.

For backend authors: a runner that implements :class:`enginehouse.contract.backend.StateKeeper` reserves
:data:`HEAD_BYTES`, writes its own data after them and calls :func:`write_head` to complete the header. Before it uses
any data to be loaded it calls :func:`check_head`, so truncated data, data of other settings or data that is not a saved
state never reaches a library that trusts it. The disk tier has a checksum over whole files; here the checksum covers
the header and as much of the following data as a runner asks for.
"""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b

from enginehouse.contract.errors import StateRefused

__all__ = ["HEAD_BYTES", "check_head", "state_body", "write_head"]

_FIELDS = struct.Struct(
    "<4s16sIQQ"
)  # magic, digest of the settings, tokens, bytes of the body, bytes covered by the checksum
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"EHs1"
HEAD_BYTES = _FIELDS.size + _CHECKSUM.size
"""Size of the header and offset of the body."""


def write_head(data: memoryview, state_format: str, num_tokens: int, *, num_checked: int = 0) -> None:
    """Write the header of a sequence's data into its first ``HEAD_BYTES`` bytes.

    Args:
        data: writable bytes, header and body.
        state_format: see :class:`enginehouse.contract.backend.StateKeeper`.
        num_tokens: length of the sequence, at least one.
        num_checked: number of bytes at the start of the body that the checksum covers, for libraries that crash the
            process on inconsistent numbers; values above the size of the body cover all of it.
    """
    body = state_body(data)
    num_checked = min(num_checked, body.nbytes)
    _FIELDS.pack_into(data, 0, _MAGIC, _digest(state_format), num_tokens, body.nbytes, num_checked)
    _CHECKSUM.pack_into(data, _FIELDS.size, _checksum(data, num_checked))


def check_head(data: memoryview, state_format: str) -> int:
    """Validate the header and return the number of tokens in the data.

    Raises:
        StateRefused: the data is truncated, too long, damaged in its checked part, or of other settings.
    """
    if data.nbytes < HEAD_BYTES:
        raise StateRefused("the data is shorter than its head")
    magic, settings, num_tokens, num_bytes, num_checked = _FIELDS.unpack(data[: _FIELDS.size])
    is_whole = magic == _MAGIC and num_tokens > 0 and num_checked <= num_bytes == data.nbytes - HEAD_BYTES
    if not is_whole or _CHECKSUM.unpack(data[_FIELDS.size : HEAD_BYTES])[0] != _checksum(data, num_checked):
        raise StateRefused("the data is not a saved sequence, or is damaged")
    if settings != _digest(state_format):
        raise StateRefused("the sequence was saved with other settings or by another version of the backend")
    return int(num_tokens)


def state_body(data: memoryview) -> memoryview:
    """Return the runner's own part of the data."""
    return data[HEAD_BYTES:]


def _digest(state_format: str) -> bytes:
    return blake2b(state_format.encode(), digest_size=16).digest()


def _checksum(data: memoryview, num_checked: int) -> int:
    return zlib.crc32(data[HEAD_BYTES : HEAD_BYTES + num_checked], zlib.crc32(data[: _FIELDS.size]))
