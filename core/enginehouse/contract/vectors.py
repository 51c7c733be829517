"""Rows of float32 as JSON: lists of numbers, or base64 of their bytes. For surfaces that answer with embeddings.

Python numbers exist for one row at a time. A number has at most nine digits, which are enough to
read the same float32 from them.
"""

from __future__ import annotations

import asyncio
import binascii
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["VectorFormat", "write_vectors"]

VectorFormat = Literal["float", "base64"]
"""A list of numbers, or the little-endian bytes of the row as base64."""

_MANY_NUMBERS = 8192
"""Written as a list in about half a millisecond."""
_BLOCK_ROWS = 64
_NUM_DIGITS = 9
"""Decimal digits that distinguish all float32."""

_threads = ThreadPoolExecutor(2, "vectors")
"""Two, as JSON takes three times the memory of its numbers, and one thread at a time runs Python code anyway."""

_encode = msgspec.json.Encoder().encode


async def write_vectors(rows: NDArray[np.float32], form: VectorFormat = "float") -> list[msgspec.Raw]:
    """Return the JSON of each row, ``(num_rows, width)`` float32; many are written off the event loop."""
    write = _as_numbers if form == "float" else _as_base64
    if rows.size <= _MANY_NUMBERS:
        return write(rows)
    return await asyncio.get_running_loop().run_in_executor(_threads, write, rows)


def _as_base64(rows: NDArray[np.float32]) -> list[msgspec.Raw]:
    return [msgspec.Raw(b'"' + binascii.b2a_base64(row, newline=False) + b'"') for row in rows]


def _as_numbers(rows: NDArray[np.float32]) -> list[msgspec.Raw]:
    blocks = (_shortened(rows[start : start + _BLOCK_ROWS]) for start in range(0, len(rows), _BLOCK_ROWS))
    return [msgspec.Raw(_encode(row.tolist())) for block in blocks for row in block]


def _shortened(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the numbers rounded to nine digits; not a number and infinity stay."""
    exact = rows.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        num_decimals = _NUM_DIGITS - 1 - np.floor(np.log10(np.abs(exact)))
    power = 10.0 ** np.where(np.isfinite(num_decimals), num_decimals, 0)
    rounded: NDArray[np.float64] = np.round(exact * power) / power
    return rounded
