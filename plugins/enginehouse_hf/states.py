"""Saved sequences: core's header, then keys and values of all layers. Used by both runners.

Pieces (``pieces.py``) have the shape in which their runner stores them. Does not know slots or positions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from enginehouse.contract.errors import StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, check_head, state_body, write_head
from enginehouse_hf.pieces import host_bytes

__all__ = ["check_state", "pack_lengths", "pack_pieces", "read_lengths", "unpack_pieces"]

_LENGTH = struct.Struct("<I")

_Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a piece."""


def pack_pieces(
    pieces: Iterable[Tensor], num_bytes: int, num_tokens: int, state_format: str, before: bytes = b""
) -> memoryview:
    """Serialise the pieces; each is copied from its device in turn.

    Args:
        pieces: of all layers.
        num_bytes: total size of the pieces.
        num_tokens, state_format: written to the header.
        before: the runner's own bytes before the pieces, covered by the checksum.
    """
    array = np.empty(HEAD_BYTES + len(before) + num_bytes, np.uint8)
    array[HEAD_BYTES : HEAD_BYTES + len(before)] = np.frombuffer(before, np.uint8)
    body, end = array[HEAD_BYTES + len(before) :], 0
    for piece in pieces:
        numbers = host_bytes(piece.cpu())
        begin, end = end, end + numbers.nbytes
        body[begin:end].reshape(numbers.shape)[...] = numbers
    assert end == num_bytes, "there are as many bytes as the layers say"
    data = memoryview(array)
    write_head(data, state_format, num_tokens, num_checked=len(before))
    return data


def pack_lengths(lengths: Sequence[int]) -> bytes:
    """Return the lengths of the checkpoints of a sequence as bytes."""
    return b"".join(_LENGTH.pack(number) for number in (len(lengths), *lengths))


def read_lengths(data: memoryview, num_tokens: int) -> tuple[list[int], int]:
    """Read the lengths at the beginning of ``data``; return them, and the number of bytes.

    Raises:
        StateRefused: they do not fit a sequence of ``num_tokens`` tokens.
    """
    count = _LENGTH.unpack_from(data)[0] if data.nbytes >= _LENGTH.size else num_tokens + 1
    end = (1 + count) * _LENGTH.size
    if count > num_tokens or end > data.nbytes:
        raise StateRefused("the data ends in the list of its checkpoints")
    lengths = [length for (length,) in _LENGTH.iter_unpack(data[_LENGTH.size : end])]
    if not all(before < after for before, after in pairwise([0, *lengths, num_tokens + 1])):
        raise StateRefused("the list of its checkpoints does not fit the sequence")
    return lengths, end


def check_state(data: memoryview, state_format: str, bytes_per_token: int, num_before: int = 0) -> int:
    """Return the number of tokens in the saved state.

    Args:
        num_before: number of bytes before the pieces.

    Raises:
        StateRefused: the data is not a state, is damaged, or belongs to another model or other settings.
    """
    num_tokens = check_head(data, state_format)
    if state_body(data).nbytes != num_before + num_tokens * bytes_per_token:
        raise StateRefused("the sequence was saved by a model of another size")
    return num_tokens


def unpack_pieces(data: memoryview, forms: Iterable[_Form], num_before: int = 0) -> Iterator[Tensor]:
    """Yield the pieces of checked data, on the CPU; they share memory with ``data``."""
    array = np.frombuffer(state_body(data)[num_before:], np.uint8)
    body = torch.from_numpy(array if array.flags.writeable else array.copy())
    end = 0
    for shape, dtype in forms:
        begin, end = end, end + int(np.prod(shape)) * dtype.itemsize
        yield body[begin:end].view(dtype).view(shape)
