"""Limit of the length of numbers: a model at a loss writes digits until the answer is cut.

17 digits and an exponent say everything about a number of 64 bits. Exponents have at most two digits, so that no reader
takes the number for infinity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginehouse_llguidance.tokens import TokenTexts

__all__ = ["DigitLimit", "limit_number"]

_MAX_CHARS = 24  # 17 digits, the zeros before them, sign and point
_MAX_EXPONENT_DIGITS = 2
_NUMBER = b"0123456789.eE+-"


class DigitLimit:
    """Follows the written JSON as far as it needs to know the number at its end.

    Args:
        tokens: the vocabulary.
    """

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._number = b""
        self._is_in_string = False
        self._is_escaped = False

    def accept(self, text: bytes) -> None:
        """Follow the bytes of a token."""
        if b'"' in text or b"\\" in text or self._is_escaped:
            for byte in text:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == 0x22:
                    self._is_in_string = not self._is_in_string
                elif byte == 0x5C:
                    self._is_escaped = self._is_in_string
        if self._is_in_string:
            self._number = b""
            return
        tail = len(text) - len(text.rstrip(_NUMBER))
        self._number = (self._number + text) if tail == len(text) else text[len(text) - tail :]

    def restrict(self, bitmask: NDArray[np.int32]) -> None:
        """Forbid further digits of a number that is long enough, unless nothing else may follow."""
        limit_number(self._number, self._tokens, bitmask)


def limit_number(number: bytes, tokens: TokenTexts, bitmask: NDArray[np.int32]) -> None:
    """Forbid what would make a number too long, unless nothing else may follow.

    Args:
        number: its text so far; empty outside of numbers.
    """
    if not number:
        return
    mantissa, mark, exponent = number.lower().partition(b"e")
    if mark:
        num_digits = len(exponent.lstrip(b"+-"))
        allowed = tokens.short_exponents[max(0, _MAX_EXPONENT_DIGITS - num_digits)]
    elif len(mantissa) >= _MAX_CHARS:
        allowed = tokens.ending_digits
    else:
        allowed = tokens.long_exponent_free
    if (left := bitmask & allowed).any():
        bitmask[:] = left
