"""A compiled constraint. Does not know constraint languages."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from enginehouse_llguidance.checked import CheckedMatcher
from enginehouse_llguidance.composed import Follower, SearchedText, Value
from enginehouse_llguidance.matcher import LlguidanceMatcher
from enginehouse_llguidance.tokens import TokenTexts

__all__ = ["LlguidanceGrammar"]


class LlguidanceGrammar:
    """A matcher in its initial state, copied for each sequence.

    Args:
        origin: matcher at the beginning of the text.
        allowed: (ceil(vocab_size / 32),) int32, bitmask of the tokens its text may contain; None means no limit besides
            the grammar.
        tokens: the vocabulary, for JSON; None for texts of other kinds.
        follower: enforces what the grammar does not say; None if it says all.
        value: the JSON value or searched text that the text is, as part of a composition; None for other texts.
    """

    def __init__(
        self,
        origin: LLMatcher,
        vocabulary: LLTokenizer,
        allowed: NDArray[np.int32] | None = None,
        tokens: TokenTexts | None = None,
        *,
        follower: Follower | None = None,
        value: Value | SearchedText | None = None,
    ) -> None:
        self.value = value
        self._origin = origin
        self._vocabulary = vocabulary
        self._allowed = allowed
        self._tokens = tokens
        self._follower = follower

    def start(self) -> LlguidanceMatcher:
        """Return a matcher at the beginning of the text; takes microseconds."""
        matcher = self._origin.deep_copy()
        if self._follower is None or self._tokens is None:
            return LlguidanceMatcher(matcher, self._vocabulary, self._allowed, self._tokens)
        return CheckedMatcher(matcher, self._vocabulary, self._allowed, self._tokens, self._follower)
