"""The texts of a vocabulary's tokens, to find those that continue a text in a given way."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUMBER", "WITH_MARKS", "TokenTexts", "bits_of", "clear", "only", "to_bits"]

_OFNUMBERS = b"0123456789.eE"
NUMBER = b"0123456789.eE+-"
"""Characters of numbers."""

WITH_MARKS = 2
"""Kind of a token with a quotation mark or a backslash; 1 is that of others at whose end a number may be."""

_NUMBER_ENDS = frozenset(NUMBER[place : place + 1] for place in range(len(NUMBER)))
_LONG_EXPONENT = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{3}")


class TokenTexts:
    """Tokens by their bytes. Built on first use: a tenth of a second for a large vocabulary.

    Args:
        token_bytes: bytes of each id.
        controls: control tokens, which are not text.
        ends: end tokens, which are not text.
    """

    def __init__(self, token_bytes: Sequence[bytes], controls: frozenset[int], ends: frozenset[int]) -> None:
        self.bytes_of = token_bytes
        self._ends = ends
        self._excluded = controls | ends

    @cached_property
    def _sorted(self) -> tuple[list[bytes], NDArray[np.int64]]:
        pairs = sorted((text, one) for one, text in enumerate(self.bytes_of) if text and one not in self._excluded)
        return [text for text, _ in pairs], np.array([one for _, one in pairs], np.int64)

    def starting_with(self, text: bytes) -> NDArray[np.int64]:
        """Return the ids of tokens that start with a text."""
        texts, ids = self._sorted
        return ids[bisect_left(texts, text) : bisect_left(texts, text + b"\xff" * 4)]

    def along(self, text: bytes) -> NDArray[np.int64]:
        """Return the ids of tokens that begin a text, or begin with it."""
        texts, ids = self._sorted
        found = [self.starting_with(text)]
        for size in range(1, min(len(text), self.longest + 1)):
            begin = text[:size]
            found.append(ids[bisect_left(texts, begin) : bisect_right(texts, begin)])
        return np.concatenate(found)

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in bytes."""
        return max(map(len, self._sorted[0]), default=0)

    @cached_property
    def closing(self) -> NDArray[np.int64]:
        """Ids of tokens that begin with the end of a string, an array or an object, and end tokens."""
        found = self._with(lambda text: text[:1] in (b'"', b"]", b"}"))
        return np.append(found, sorted(self._ends))

    @cached_property
    def ending_digits(self) -> NDArray[np.int32]:
        """(ceil(vocab_size / 32),) int32, bitmask of the tokens that do not continue a number."""
        return self._mask(lambda text: text[0] not in _OFNUMBERS)

    @cached_property
    def short_exponents(self) -> tuple[NDArray[np.int32], ...]:
        """Bitmasks of the tokens that begin with at most none, one or two digits; then of those without exponent."""
        of_digits = (self._mask(partial(_begins_with_digits, most=most)) for most in range(3))
        return (*of_digits, self._mask(lambda text: _LONG_EXPONENT.match(text) is None))

    @cached_property
    def has_long_exponents(self) -> bool:
        """True if a single token may give a number an exponent of three digits."""
        return any(map(_LONG_EXPONENT.match, self.bytes_of))

    @cached_property
    def kinds(self) -> bytes:
        """Kind of each token for the follower of numbers."""
        return bytes(
            WITH_MARKS if b'"' in text or b"\\" in text else int(text[-1:] in _NUMBER_ENDS) for text in self.bytes_of
        )

    def _mask(self, condition: Callable[[bytes], bool]) -> NDArray[np.int32]:
        bits = np.ones((len(self.bytes_of) + 31) // 32 * 32, np.uint8)
        bits[self._with(lambda text: not condition(text))] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _with(self, condition: Callable[[bytes], bool]) -> NDArray[np.int64]:
        texts = enumerate(self.bytes_of)
        found = [one for one, text in texts if text and one not in self._excluded and condition(text)]
        return np.array(found, np.int64)


def _begins_with_digits(text: bytes, most: int) -> bool:
    return len(text) - len(text.lstrip(b"0123456789")) <= most


def bits_of(bitmask: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the ids that a bitmask allows."""
    words = bitmask.view(np.uint32)
    return ids[(words[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1) == 1]


def to_bits(bitmask: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return one number for each token, 1 if it is allowed."""
    return np.unpackbits(bitmask.view(np.uint8), bitorder="little")


def only(bitmask: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return a bitmask without the tokens that are not among the ids."""
    kept = np.zeros_like(bitmask)
    np.bitwise_or.at(kept.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return kept & bitmask


def clear(bitmask: NDArray[np.int32], ids: NDArray[np.int64]) -> None:
    """Forbid tokens in a bitmask, in place."""
    words = bitmask.view(np.uint32)
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
