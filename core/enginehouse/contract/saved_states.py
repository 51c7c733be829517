"""Saved sequences as bytes: the head that every runner's data begins with, and what it refuses.

For backend authors: a runner that implements :class:`enginehouse.contract.backend.StateKeeper` makes room for
:data:`HEAD_BYTES`, writes what it knows of the sequence behind them and lets :func:`write_head` fill in the rest.
Before it believes a byte of what it is to load it asks :func:`check_head`. So data that was cut short, is of other
settings or no state at all never reaches a library that trusts it. The disk tier has a checksum over whole files;
here only the head has one, and as much of the data behind it as a runner asks for.
"""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b

from enginehouse.contract.errors import StateRefused

__all__ = ["HEAD_BYTES", "check_head", "state_body", "write_head"]

_FIELDS = struct.Struct("<4s16sIQQ")  # magic, digest of the settings, tokens, bytes of the body, how many are checked
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"EHs1"
HEAD_BYTES = _FIELDS.size + _CHECKSUM.size
"""The body begins here."""


def write_head(data: memoryview, state_format: str, num_tokens: int, *, num_checked: int = 0) -> None:
    """Complete the data of a sequence, whose first ``HEAD_BYTES`` are free.

    Args:
        data: writable bytes, head and body.
        state_format: see :class:`enginehouse.contract.backend.StateKeeper`.
        num_tokens: that the sequence holds, at least one.
        num_checked: so many bytes at the beginning of the body get a checksum, for libraries that end the process when
            numbers in it do not add up; more than there are is all.
    """
    body = state_body(data)
    num_checked = min(num_checked, body.nbytes)
    _FIELDS.pack_into(data, 0, _MAGIC, _digest(state_format), num_tokens, body.nbytes, num_checked)
    _CHECKSUM.pack_into(data, _FIELDS.size, _checksum(data, num_checked))


def check_head(data: memoryview, state_format: str) -> int:
    """The number of tokens that the data holds.

    Raises:
        StateRefused: it is cut short, too long, damaged in what is checked, or of other settings.
    """
    if data.nbytes < HEAD_BYTES:
        raise StateRefused("the data is shorter than its head")
    magic, settings, num_tokens, num_bytes, num_checked = _FIELDS.unpack(data[: _FIELDS.size])
    is_whole = magic == _MAGIC and num_tokens > 0 and num_checked <= num_bytes == data.nbytes - HEAD_BYTES
    if not is_whole or _CHECKSUM.unpack(data[_FIELDS.size : HEAD_BYTES])[0] != _checksum(data, num_checked):
        raise StateRefused("the data is no saved sequence, or is damaged")
    if settings != _digest(state_format):
        raise StateRefused("the sequence was saved with other settings or by another version of the backend")
    return int(num_tokens)


def state_body(data: memoryview) -> memoryview:
    """The runner's own part."""
    return data[HEAD_BYTES:]


def _digest(state_format: str) -> bytes:
    return blake2b(state_format.encode(), digest_size=16).digest()


def _checksum(data: memoryview, num_checked: int) -> int:
    return zlib.crc32(data[HEAD_BYTES : HEAD_BYTES + num_checked], zlib.crc32(data[: _FIELDS.size]))
