"""Adapters of the fake runner: files with a number, which changes the hash that its logits are.

A file is JSON, ``{"fake_adapter": 7, "invocation_tokens": []}``. :func:`write_fake_adapter` makes one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan

__all__ = ["FakeAdapters", "read_fake_adapter", "salt_of", "write_fake_adapter"]


def write_fake_adapter(path: Path, number: int, invocation_tokens: Sequence[int] = ()) -> Path:
    """Write an adapter and return its path."""
    data = {"fake_adapter": number, "invocation_tokens": list(invocation_tokens)}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def read_fake_adapter(path: Path) -> tuple[int, tuple[int, ...]]:
    """Return the number of an adapter, and the tokens that activate it. Raises AdapterRefused."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterRefused(f"{path.name} cannot be read: {error.strerror}", "adapters") from error
    except ValueError as error:
        raise AdapterRefused(f"{path.name} is not an adapter of the fake runner: {error}", "adapters") from error
    number = data.get("fake_adapter") if isinstance(data, dict) else None
    if not isinstance(number, int):
        raise AdapterRefused(f"{path.name} has no number 'fake_adapter'", "adapters")
    return number, tuple(data.get("invocation_tokens", ()))


def salt_of(uses: Iterable[tuple[int, float]]) -> int:
    """Return what adapters, as number and scale, change the model's hash by; 0 for none."""
    salt = 0
    for number, scale in uses:
        if scale:
            salt ^= int.from_bytes(hashlib.sha256(f"{number} {scale!r}".encode()).digest()[:8], "little")
    return salt


class FakeAdapters:
    """The loaded adapters of a fake runner."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._next = 1

    def load(self, path: Path) -> int:
        """Load a file; return its handle."""
        number, _ = read_fake_adapter(path)
        handle, self._next = self._next, self._next + 1
        self._numbers[handle] = number
        return handle

    def unload(self, adapter: int) -> None:
        """Forget an adapter."""
        del self._numbers[adapter]

    def salt(self, adapters: AdapterSet) -> int:
        """Return the salt of a set. Raises InvalidSpan if one is not loaded."""
        unknown = [handle for handle, _ in adapters if handle not in self._numbers]
        if unknown:
            raise InvalidSpan(f"adapter {unknown[0]} is not loaded")
        return salt_of((self._numbers[handle], scale) for handle, scale in adapters)
