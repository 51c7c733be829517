"""Saved sequences of the fake runner: its cells as bytes, with a checksum over all of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from enginehouse.contract.errors import StateRefused
from enginehouse_testkit.fake_model import State

__all__ = ["SavedCell", "pack_cells", "unpack_cells"]

SavedCell = tuple[int, State, int]
"""Token id, state after it, and number of layers computed."""

_HEAD = struct.Struct("<4sII")
_CELL = struct.Struct("<iQii")
_MAGIC = b"fake"


def pack_cells(cells: Sequence[SavedCell]) -> memoryview:
    """Return the cells as bytes."""
    body = b"".join(_CELL.pack(token_id, state[0], state[1], num_layers) for token_id, state, num_layers in cells)
    return memoryview(bytearray(_HEAD.pack(_MAGIC, len(cells), zlib.crc32(body)) + body))


def unpack_cells(data: memoryview) -> list[SavedCell]:
    """Return the cells; raises StateRefused if the bytes are not valid."""
    if data.nbytes < _HEAD.size:
        raise StateRefused("the data is shorter than its head")
    magic, num_cells, checksum = _HEAD.unpack(data[: _HEAD.size])
    body = data[_HEAD.size :]
    if magic != _MAGIC or body.nbytes != num_cells * _CELL.size or zlib.crc32(body) != checksum:
        raise StateRefused("the data is not a saved sequence, or is damaged")
    return [(token_id, (number, missing), layers) for token_id, number, missing, layers in _CELL.iter_unpack(body)]
