"""Sequence breakers of DRY: finds given strings in a text by the bytes of its tokens.

Strings are compared as UTF-8 bytes, so tokens with partial characters need no special handling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BreakerCache", "Breakers"]

_MAX_KEPT = 64


class Breakers:
    """Breaker strings for one vocabulary.

    Args:
        vocabulary: the bytes of every token.
        strings: non-empty strings.

    Attributes:
        holds_one: (vocab_size,) bool, True for tokens whose own bytes contain one of the strings.
    """

    def __init__(self, vocabulary: _Vocabulary, strings: Sequence[str]) -> None:
        patterns = [string.encode("utf-8", "replace") for string in strings]
        self.holds_one = np.zeros(len(vocabulary.token_bytes), np.bool_)
        for pattern in patterns:
            self.holds_one[vocabulary.holding(pattern)] = True
        self._token_bytes = vocabulary.token_bytes
        self._spanning = [pattern for pattern in patterns if len(pattern) > 1]
        self._overlap = max(map(len, self._spanning), default=1) - 1

    def distance(self, token_ids: NDArray[np.int32], most: int) -> int:
        """Return the number of tokens at the end without any part of a breaker, at most ``most``."""
        recent = token_ids[-most:] if most else token_ids[:0]
        breaking = np.flatnonzero(self.holds_one[recent])
        num_free = recent.size if not breaking.size else recent.size - 1 - int(breaking[-1])
        return self._distance_in_text(token_ids, num_free) if self._spanning and num_free else num_free

    def _distance_in_text(self, token_ids: NDArray[np.int32], num_free: int) -> int:
        """Return the same for breakers that may span tokens; none of the last ``num_free`` contains a whole one."""
        pieces = [self._token_bytes[token_id] for token_id in token_ids[token_ids.size - num_free :].tolist()]
        before = b""  # enough for a breaker that merely ends among the last tokens
        for token_id in token_ids[: token_ids.size - num_free][::-1].tolist():
            if len(before) >= self._overlap:
                break
            before = self._token_bytes[token_id] + before
        before = before[len(before) - min(len(before), self._overlap) :]
        text = before + b"".join(pieces)
        found = [text.rfind(pattern) + len(pattern) for pattern in self._spanning if pattern in text]
        end = max(found, default=0)
        if end <= len(before):
            return num_free
        ends = len(before) + np.cumsum([len(piece) for piece in pieces])
        last = int(np.searchsorted(ends, end, side="left"))  # the token with the breaker's last byte
        return num_free - 1 - last


class _Vocabulary:
    """The bytes of all tokens as one array."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self._joined = np.frombuffer(b"".join(token_bytes), np.uint8)
        self._ends = np.cumsum([len(piece) for piece in token_bytes])

    def holding(self, pattern: bytes) -> NDArray[np.int64]:
        """Ids of the tokens whose bytes contain ``pattern``."""
        starts = np.flatnonzero(self._joined[: max(0, self._joined.size - len(pattern) + 1)] == pattern[0])
        for offset, byte in enumerate(pattern[1:], start=1):
            starts = starts[self._joined[starts + offset] == byte]
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, starts + len(pattern) - 1, side="right")
        return first[first == last]


class BreakerCache:
    """Cache of breakers by their strings, for the last used vocabulary: a process runs one model."""

    def __init__(self) -> None:
        self._kept: tuple[_Vocabulary | None, dict[tuple[str, ...], Breakers]] = (None, {})

    def of(self, token_bytes: Sequence[bytes], strings: tuple[str, ...]) -> Breakers:
        """Return the breakers, computed on first use: a few milliseconds."""
        vocabulary, known = self._kept
        if vocabulary is None or vocabulary.token_bytes is not token_bytes:
            vocabulary, known = _Vocabulary(token_bytes), {}
            self._kept = vocabulary, known
        breakers = known.get(strings)
        if breakers is None:
            if len(known) >= _MAX_KEPT:
                known.clear()
            breakers = known[strings] = Breakers(vocabulary, strings)
        return breakers
