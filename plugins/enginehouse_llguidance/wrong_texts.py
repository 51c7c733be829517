"""The beginnings of an answer that were found to be wrong, sorted, so that a look-up takes time for its length only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

__all__ = ["WrongTexts"]


class WrongTexts:
    """Texts that no answer begins with. None of them begins with another."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, text: bytes) -> None:
        """Add a text, instead of those that begin with it."""
        if not self.has_beginning_of(text):
            self._sorted[self._first(text) : self._end(text)] = [text]

    def has_beginning_of(self, text: bytes) -> bool:
        """Return True if a text begins with one of these."""
        before = bisect_right(self._sorted, text)  # what sorts between a text and its beginning has the same beginning
        return before > 0 and text.startswith(self._sorted[before - 1])

    def after(self, text: bytes, longest: int) -> Iterator[bytes]:
        """Yield what makes a text wrong if it follows, where that has at most ``longest`` bytes."""
        size, index, end = len(text), self._first(text), self._end(text)
        while index < end:
            one = self._sorted[index]
            if len(one) - size > longest:
                index = self._end(one[: size + longest], index)
            else:
                if len(one) > size:
                    yield one[size:]
                index += 1

    def clear(self) -> None:
        """Forget all."""
        self._sorted.clear()

    def _first(self, text: bytes) -> int:
        return bisect_left(self._sorted, text)

    def _end(self, text: bytes, low: int = 0) -> int:
        """Return the index after those that begin with a text."""
        stripped = text.rstrip(b"\xff")
        if not stripped:
            return len(self._sorted)
        return bisect_left(self._sorted, stripped[:-1] + bytes([stripped[-1] + 1]), low)
