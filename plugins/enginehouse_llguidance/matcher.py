"""Tracks one sequence through a compiled grammar. Does not know constraint languages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed
from enginehouse_llguidance.digits import DigitLimit, limit_number
from enginehouse_llguidance.tokens import TokenTexts
from enginehouse_llguidance.unique import UniqueItems, UniqueSites

__all__ = ["JsonRules", "LlguidanceGrammar", "LlguidanceMatcher"]


@frozen(eq=False)
class JsonRules:
    """Rules for JSON that a grammar cannot express.

    Attributes:
        tokens: the vocabulary.
        sites: the arrays that must not have equal items; None if there are none.
    """

    tokens: TokenTexts
    sites: UniqueSites | None = None


class LlguidanceGrammar:
    """A compiled constraint: a matcher in its initial state, copied for each sequence.

    Args:
        origin: matcher at the beginning of the text.
        allowed: (ceil(vocab_size / 32),) int32, bitmask of the tokens its text may contain; None means no limit besides
            the grammar.
        rules: what is enforced besides the grammar while JSON is written; None for texts of other kinds.
    """

    def __init__(
        self,
        origin: LLMatcher,
        vocabulary: LLTokenizer,
        allowed: NDArray[np.int32] | None = None,
        rules: JsonRules | None = None,
    ) -> None:
        self._origin = origin
        self._vocabulary = vocabulary
        self._allowed = allowed
        self._rules = rules

    def start(self) -> LlguidanceMatcher:
        """Return a matcher at the beginning of the text; takes microseconds."""
        return LlguidanceMatcher(self._origin.deep_copy(), self._vocabulary, self._allowed, self._rules)


class LlguidanceMatcher:
    """Implements :class:`enginehouse.contract.structured.Matcher`."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        allowed: NDArray[np.int32] | None,
        rules: JsonRules | None,
    ) -> None:
        self._matcher = matcher
        self._allowed = allowed
        self._digits = self._unique = None
        if rules is not None:
            self._tokens = rules.tokens
            self._digits = DigitLimit(rules.tokens)
            self._unique = UniqueItems(rules.sites, rules.tokens) if rules.sites is not None else None
        self._end_ids = vocabulary.eos_tokens

    def fill_bitmask(self, bitmask: NDArray[np.int32]) -> None:
        """Write the mask in place; the library releases the GIL meanwhile."""
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
        if self._digits is not None and self._digits.number:
            limit_number(self._digits.number, self._tokens, bitmask)
        if self._unique is not None:
            self._unique.restrict(bitmask, self._matcher)

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
            if self._unique is not None and token_id not in self._end_ids:
                self._unique.accept(self._tokens.bytes_of[token_id])

    def forced_token_ids(self) -> Sequence[int]:
        """Tokens of the only possible text, cut where the tokenizer could still choose another token."""
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def is_finished(self) -> bool:
        """True if only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("\n", 1)[0][:200]
            raise GenerationFailed(f"The constraint cannot be followed any further: {reason}", "llguidance")
