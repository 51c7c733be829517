"""The matcher of constraints that a grammar does not express: takes wrong values back, as core's loop lets it.

A text that turned out wrong is never written again, in any tokens. What leads to such texts only is wrong as
well, so the last token that had an alternative is undone. If that has failed several times, more is undone at once,
since the cause is further back.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed
from enginehouse_llguidance.composed import Follower, Thread
from enginehouse_llguidance.digits import DigitLimit
from enginehouse_llguidance.following import ENDS_OF_SCALARS, WrongValue
from enginehouse_llguidance.matcher import LlguidanceMatcher
from enginehouse_llguidance.tokens import TokenTexts, clear, only
from enginehouse_llguidance.wrong_texts import WrongTexts

__all__ = ["CheckedMatcher"]

_PATIENCE = 30
"""Wrong ends without a longer text between them, after which twice as many choices are undone at once."""

_MAX_EVALUATED = 1_000_000
"""Pairs of a schema and a part of a value, to find out in one answer that values are wrong: two seconds."""


class _Before(NamedTuple):
    """State before a held token."""

    size: int
    threads: frozenset[Thread]
    digits: tuple[bytes, bool, bool]


class CheckedMatcher(LlguidanceMatcher):
    """Implements :class:`enginehouse.contract.structured.BacktrackingMatcher`."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: LLTokenizer,
        allowed: NDArray[np.int32] | None,
        tokens: TokenTexts,
        follower: Follower,
    ) -> None:
        super().__init__(matcher, vocabulary, allowed, tokens)
        self._digits: DigitLimit = DigitLimit(tokens)
        self._texts = tokens
        self._follower = follower
        self._text = bytearray()
        self._threads = follower.start
        self._held: deque[_Before] = deque()
        self._is_wrong = False
        self._wrong = WrongTexts()
        self._wrong_ends: set[bytes] = set()  # no text may end there
        self._num_wrong = self._longest = self._num_evaluated = 0

    def accept(self, token_id: int) -> None:
        """Advance by one token."""
        before = _Before(len(self._text), self._threads, self._digits.state)
        super().accept(token_id)
        self._held.append(before)
        is_end = token_id in self._end_ids
        try:
            if not is_end:
                self._text += self._texts.bytes_of[token_id]
                self._threads = self._follower.follow(self._threads, self._text, before.size)
            if is_end or self.is_finished():
                self._follower.end(self._threads, self._text)
        except WrongValue as found:
            self._is_wrong = True
            if is_end:
                self._wrong_ends.add(bytes(self._text))
            else:
                for one in found.beginnings:
                    self._wrong.add(one)
            self._count_evaluated(found.num_evaluated)
            return
        except (ValueError, RecursionError) as error:
            raise _failed(str(error)) from error
        if len(self._text) > self._longest:
            self._longest, self._num_wrong = len(self._text), 0
        self._forget_final()

    def _count_evaluated(self, number: int) -> None:
        self._num_evaluated += number
        if self._num_evaluated > _MAX_EVALUATED:
            message = f"wrong values took {_MAX_EVALUATED} pairs of a schema and a part of a value to check"
            raise _failed(f"no valid value was found: {message}")

    def _forget_final(self) -> None:
        """Forget the states before tokens that cannot be undone any more."""
        begin = self._follower.held_from(self._threads, len(self._text))
        while self._held:
            end = self._held[1].size if len(self._held) > 1 else len(self._text)
            if begin is not None and end > begin:
                return
            self._held.popleft()
        self._wrong.clear()
        self._wrong_ends.clear()

    def num_held(self) -> int:
        """Return how many tokens at the end may still be undone."""
        return len(self._held)

    def backtrack(self) -> int:
        """Undo the last tokens if they lead to wrong values only; return their number."""
        if not self._is_wrong:
            if not (self._wrong or self._wrong_ends) or self._has_choice():
                return 0
            self._wrong.add(bytes(self._text))
        self._is_wrong = False
        return self._undo()

    def _undo(self) -> int:
        num_undone = 0
        num_spared = min((1 << self._num_wrong // _PATIENCE) - 1, len(self._held) // 2)
        self._num_wrong += 1
        while self._held:
            before = self._held.pop()
            self._matcher.rollback(1)
            del self._text[before.size :]
            self._threads, self._digits.state = before.threads, before.digits
            num_undone += 1
            if self._has_choice():
                if not num_spared or not self._held:
                    return num_undone
                num_spared -= 1
            self._wrong.add(bytes(self._text))
        raise _failed("no value was found that satisfies it")

    def _has_choice(self) -> bool:
        """Return True if some text may follow that is not known to be wrong."""
        if self._matcher.is_stopped():
            return bytes(self._text) not in self._wrong_ends
        forced = self._text + b"".join(self._texts.bytes_of[one] for one in self._matcher.compute_ff_tokens())
        if self._wrong.has_beginning_of(bytes(forced)):
            return False
        bitmask = np.empty((len(self._texts.bytes_of) + 31) // 32, np.int32)
        self.fill_bitmask(bitmask)
        return bool(bitmask.any())

    def fill_bitmask(self, bitmask: NDArray[np.int32]) -> None:
        """Write the mask in place, without what is known to be wrong."""
        self._fill(bitmask)
        if not self._restrict(bitmask):
            self._limit_digits(bitmask)
        text = bytes(self._text)
        if not (self._wrong or self._wrong_ends):
            return
        ids = [self._texts.starting_with(one) for one in self._wrong.after(text, self._texts.longest)]
        if ids:
            clear(bitmask, np.concatenate(ids))
        if text in self._wrong_ends:
            clear(bitmask, np.array(self._end_ids, np.int64))

    def _restrict(self, bitmask: NDArray[np.int32]) -> bool:
        """Forbid all but what is known to follow; return True if something is known."""
        following = None if self._matcher.is_stopped() else self._follower.next_of(self._threads, self._text)
        if not following:
            return False
        allowed = [self._texts.along(one) for left in following for one in ([left] if left else ENDS_OF_SCALARS)]
        allowed += [np.array(self._end_ids, np.int64)] if b"" in following else []
        kept = only(bitmask, np.concatenate(allowed))
        is_any = bool(kept.any())  # not where a composition goes on in another way
        if is_any:
            bitmask[:] = kept
        return is_any


def _failed(reason: str) -> GenerationFailed:
    return GenerationFailed(f"The constraint cannot be followed any further: {reason}.", "llguidance")
