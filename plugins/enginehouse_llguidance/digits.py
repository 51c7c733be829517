"""Limit of the length of numbers: a model may repeat digits until the answer is cut.

17 digits and an exponent say everything about a number of 64 bits. Exponents have at most two digits, so that no reader
takes the number for infinity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginehouse_llguidance.tokens import NUMBER, WITH_MARKS, TokenTexts

__all__ = ["DigitLimit"]

_MAX_CHARS = 24  # 17 digits, the zeros before them, sign and point
_MAX_EXPONENT_DIGITS = 2


class DigitLimit:
    """Follows the written JSON as far as it needs to know the number at its end. Most tokens cost one look-up.

    Args:
        tokens: the vocabulary.

    Attributes:
        number: the number at the end of the text; empty outside of numbers.
    """

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._kinds = tokens.kinds
        self.number = b""
        self._is_in_string = False
        self._is_escaped = False

    def accept(self, token_id: int) -> None:
        """Follow a token."""
        kind = self._kinds[token_id]
        if kind == WITH_MARKS or self._is_escaped:
            self._follow(self._tokens.bytes_of[token_id])
        elif not self._is_in_string and (kind or self.number):
            self._extend(self._tokens.bytes_of[token_id])

    @property
    def state(self) -> tuple[bytes, bool, bool]:
        """All that it knows; may be set to go back."""
        return self.number, self._is_in_string, self._is_escaped

    @state.setter
    def state(self, state: tuple[bytes, bool, bool]) -> None:
        self.number, self._is_in_string, self._is_escaped = state

    def _follow(self, text: bytes) -> None:
        for byte in text:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == 0x22:
                self._is_in_string = not self._is_in_string
            elif byte == 0x5C:
                self._is_escaped = self._is_in_string
        self.number = b""
        if not self._is_in_string:
            self._extend(text)

    def _extend(self, text: bytes) -> None:
        tail = len(text) - len(text.rstrip(NUMBER))
        self.number = (self.number + text) if tail == len(text) else text[len(text) - tail :]

    def limit(self, bitmask: NDArray[np.int32]) -> None:
        """Forbid what would make the number at the end too long, unless nothing else may follow."""
        number, tokens = self.number, self._tokens
        mark = max(number.find(b"e"), number.find(b"E"))
        if mark >= 0:
            num_digits = len(number[mark + 1 :].lstrip(b"+-"))
            allowed = tokens.short_exponents[max(0, _MAX_EXPONENT_DIGITS - num_digits)]
        elif len(number) >= _MAX_CHARS:
            allowed = tokens.ending_digits
        elif tokens.has_long_exponents:
            allowed = tokens.short_exponents[-1]
        else:
            return
        if (left := bitmask & allowed).any():
            bitmask[:] = left
