"""Tracks one sequence through a compiled grammar. Does not know constraint languages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed
from enginehouse_llguidance.digits import DigitLimit
from enginehouse_llguidance.tokens import TokenTexts

__all__ = ["LlguidanceMatcher", "TooMuchWork"]


class TooMuchWork(ValueError):
    """A token takes more work than the library is allowed, so that no text can follow."""


class LlguidanceMatcher:
    """Implements :class:`enginehouse.contract.structured.Matcher`.

    Args:
        matcher: at the beginning of the text.
        allowed: (ceil(vocab_size / 32),) int32, bitmask of the tokens the text may contain; None means no limit besides
            the grammar.
        tokens: the vocabulary, for JSON, whose numbers have a limited length; None for other texts.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        allowed: NDArray[np.int32] | None,
        tokens: TokenTexts | None,
    ) -> None:
        self._matcher = matcher
        self._allowed = allowed
        self._digits = DigitLimit(tokens) if tokens is not None else None
        self._end_ids = vocabulary.eos_tokens

    def fill_bitmask(self, bitmask: NDArray[np.int32]) -> None:
        """Write the mask in place; the library releases the GIL meanwhile."""
        self._fill(bitmask)
        self._limit_digits(bitmask)

    def _limit_digits(self, bitmask: NDArray[np.int32]) -> None:
        if self._digits is not None and self._digits.number and not self.is_finished():
            self._digits.limit(bitmask)

    def _fill(self, bitmask: NDArray[np.int32]) -> None:
        """Write the mask without a limit of numbers."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            bitmask[:] = 0
            self._allow_end(bitmask)
            return
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        self._check()
        if self._allowed is not None:
            bitmask &= self._allowed
            if self._matcher.is_accepting():
                self._allow_end(bitmask)

    def _allow_end(self, bitmask: NDArray[np.int32]) -> None:
        words = bitmask.view(np.uint32)
        for token_id in self._end_ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def accept(self, token_id: int) -> None:
        """Advance by one token."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise GenerationFailed(f"The token {token_id} is not allowed by the constraint.", "llguidance")
        if self._digits is not None:
            self._digits.accept(token_id)

    def forced_token_ids(self) -> Sequence[int]:
        """Tokens of the only possible text, cut where the tokenizer could still choose another token."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def is_finished(self) -> bool:
        """True if only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("\n", 1)[0][:200]
            message = f"The constraint cannot be followed any further: {reason}"
            raise GenerationFailed(message, "llguidance") from TooMuchWork(reason)
