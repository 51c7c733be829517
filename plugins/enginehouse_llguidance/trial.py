"""Tries whether values exist that satisfy a schema, by writing some at random as the loop would."""

from __future__ import annotations

import random

import numpy as np

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.structured import BacktrackingMatcher, Matcher
from enginehouse_llguidance.compiled import LlguidanceGrammar
from enginehouse_llguidance.matcher import TooMuchWork
from enginehouse_llguidance.schemas.problems import SchemaProblem
from enginehouse_llguidance.schemas.validation import TooLarge
from enginehouse_llguidance.tokens import TokenTexts, bits_of, to_bits

__all__ = ["check_has_value"]

_MAX_STEPS = 4000  # of all trials
_MAX_TOKENS = 2000  # of a value; a longer one counts as found, unless its last end was wrong
_MAX_GROWTH = 400  # tokens after a wrong end, none of which makes text final
_TRIALS = ((300, 0.7), *((30, likes_closing) for likes_closing in (0.7, 0.4, 0.9) * 6))
"""Number of times that text is taken back until a trial is given up, and how likely the trial closes a value."""


def check_has_value(grammar: LlguidanceGrammar, tokens: TokenTexts, end_ids: frozenset[int]) -> None:
    """Write values until one is found; each trial begins with another byte, as far as there is a choice.

    Raises:
        SchemaProblem: none is found within a limited number of steps, a value is too large to be checked, or a token
            takes more work than is allowed.
    """
    trials = _Trials(tokens, end_ids)
    for number, (most, likes_closing) in enumerate(_TRIALS):
        try:
            if trials.finds_value(grammar.start(), number, most, likes_closing):
                return
        except GenerationFailed as error:
            if isinstance(error.__cause__, TooLarge | TooMuchWork):
                raise SchemaProblem("", str(error.__cause__)) from error
        if trials.num_left <= 0:
            break
    raise SchemaProblem("", "no value was found that satisfies the schema")


class _Trials:
    def __init__(self, tokens: TokenTexts, end_ids: frozenset[int]) -> None:
        self._tokens = tokens
        self._end_ids = end_ids
        self._bitmask = np.zeros((len(tokens.bytes_of) + 31) // 32, np.int32)
        self._chance = random.Random(0)
        self.num_left = _MAX_STEPS

    def finds_value(self, matcher: Matcher, number: int, most: int, likes_closing: float) -> bool:
        """Write a value; return False if text was taken back ``most`` times without any that became final, or if the
        value only grows because each of its ends is wrong.
        """
        assert isinstance(matcher, BacktrackingMatcher)
        size = num_final = num_backtracks = wrong_size = 0
        is_begun = False
        while not matcher.is_finished():
            if num_backtracks and size >= wrong_size + _MAX_GROWTH:
                return False
            if size >= _MAX_TOKENS and not num_backtracks:
                return True
            if self.num_left <= 0:
                return number == 0 and num_backtracks == 0  # the first trial made progress up to here
            self.num_left -= 1
            matcher.fill_bitmask(self._bitmask)
            token_id = self._token(likes_closing) if is_begun or not number else self._first_token(number)
            is_begun = is_begun or np.count_nonzero(self._bitmask) > 1
            matcher.accept(token_id)
            if num_wrong := matcher.backtrack():
                size += 1 - num_wrong
                wrong_size = wrong_size if num_backtracks else size
                num_backtracks += 1
                if num_backtracks == most:
                    return False
                continue
            if token_id in self._end_ids:
                break
            size += 1
            if size - matcher.num_held() > num_final:
                num_final, num_backtracks = size - matcher.num_held(), 0
        return True

    def _token(self, likes_closing: float) -> int:
        closing = self._tokens.closing
        preferred = bits_of(self._bitmask, closing) if self._chance.random() < likes_closing else closing[:0]
        return int(self._chance.choice(preferred if preferred.size else np.flatnonzero(to_bits(self._bitmask))))

    def _first_token(self, number: int) -> int:
        """Return a token whose first byte is another one for each number."""
        of_byte = {self._tokens.bytes_of[one][:1]: one for one in np.flatnonzero(to_bits(self._bitmask)).tolist()}
        return of_byte[sorted(of_byte)[number % len(of_byte)]]
