"""Amounts of memory: as settings write them, and as messages show them.

A part of ``config``. Knows no models and measures nothing; what a machine has is asked by ``models``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

__all__ = ["MAIN_MEMORY", "ByteCount", "MemoryBudget", "format_bytes", "read_bytes"]

MAIN_MEMORY = "cpu"
"""Name of the machine's main memory among the devices."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@frozen
class ByteCount:
    """One amount, of memory or of a disk."""

    num_bytes: int

    @classmethod
    def read(cls, value: Any) -> ByteCount:
        """As settings write it; raises ValueError."""
        return cls(read_bytes(value))

    def __str__(self) -> str:
        """For people, and for :meth:`read`."""
        return format_bytes(self.num_bytes)


@frozen
class MemoryBudget:
    """How much memory models may hold, by device. A device that is not named has no bound of its own."""

    by_device: Mapping[str, int]

    @classmethod
    def read(cls, value: Any) -> MemoryBudget:
        """One amount for main memory, or a table of them by device.

        Raises:
            ValueError: it is neither; says which forms there are.
        """
        if isinstance(value, dict):
            return cls({device: read_bytes(amount) for device, amount in value.items()})
        return cls({MAIN_MEMORY: read_bytes(value)})


def read_bytes(value: Any) -> int:
    """A number of bytes, written as one or like ``"8GiB"`` or ``"500 MB"``; raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None or found[2] not in _UNITS:
            raise ValueError("must be a number of bytes or an amount such as '8GiB' or '500MB'")
        num_bytes = int(float(found[1]) * _UNITS[found[2]])
    if num_bytes <= 0:
        raise ValueError("must be more than 0 bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """For messages, such as ``7.5 GiB``."""
    amount, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"
