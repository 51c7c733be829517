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

_HEAD = struct.Struct("<4sIII")
_LENGTH = struct.Struct("<I")
_CELL = struct.Struct("<iQii")
_MAGIC = b"fake"


def pack_cells(cells: Sequence[SavedCell], checkpoints: Sequence[int] = ()) -> memoryview:
    """Return the cells as bytes, and the lengths of checkpoints, whose states are those of the cells."""
    body = b"".join(_CELL.pack(token_id, state[0], state[1], num_layers) for token_id, state, num_layers in cells)
    body += b"".join(map(_LENGTH.pack, checkpoints))
    return memoryview(bytearray(_HEAD.pack(_MAGIC, len(cells), len(checkpoints), zlib.crc32(body)) + body))


def unpack_cells(data: memoryview) -> tuple[list[SavedCell], list[int]]:
    """Return the cells and the lengths of checkpoints; raises StateRefused if the bytes are not valid."""
    if data.nbytes < _HEAD.size:
        raise StateRefused("the data is shorter than its head")
    magic, num_cells, num_checkpoints, checksum = _HEAD.unpack(data[: _HEAD.size])
    body = data[_HEAD.size :]
    end = num_cells * _CELL.size
    if magic != _MAGIC or body.nbytes != end + num_checkpoints * _LENGTH.size or zlib.crc32(body) != checksum:
        raise StateRefused("the data is not a saved sequence, or is damaged")
    cells = [
        (token_id, (number, missing), layers) for token_id, number, missing, layers in _CELL.iter_unpack(body[:end])
    ]
    return cells, [length for (length,) in _LENGTH.iter_unpack(body[end:])]
