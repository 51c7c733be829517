"""Turns of the callers that wait, and of adapter sets where a forward pass has one of them.

Used by the scheduler of generations; the queue of pooling requests uses the first part. Does not know sequences.
"""

from __future__ import annotations

from collections.abc import Collection

from enginehouse.contract.adapters import AdapterSet

__all__ = ["AdapterTurns", "FairShares"]

_PROMPT_WEIGHT = 1
_ANSWER_WEIGHT = 2
"""A generated token costs about two prompt tokens; the paper's weights, which match usual prices."""

_MAX_CALLERS = 1024


class FairShares:
    """Service received by each caller, in weighted tokens."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._last: str | None = None  # the caller that started last

    def of(self, caller: str) -> float:
        """Return the service received by a caller; the caller with the least is next."""
        return self._given.get(caller, 0.0)

    def arrive(self, caller: str, waiting: Collection[str]) -> None:
        """Register a request of ``caller`` that starts to wait while the callers ``waiting`` wait."""
        if caller in waiting:
            return
        if waiting:
            least = min(self.of(other) for other in waiting)
        else:
            least = self.of(self._last) if self._last is not None else 0.0
        self._forget(least, waiting)
        self._given[caller] = max(self.of(caller), least)

    def start(self, caller: str, num_tokens: int) -> None:
        """Charge ``caller`` for a started sequence with ``num_tokens`` prompt tokens to compute."""
        self._given[caller] = self.of(caller) + _PROMPT_WEIGHT * num_tokens
        self._last = caller

    def generated(self, caller: str, num_tokens: int) -> None:
        """Charge ``caller`` for ``num_tokens`` generated tokens."""
        self._given[caller] = self.of(caller) + _ANSWER_WEIGHT * num_tokens

    def _forget(self, least: float, waiting: Collection[str]) -> None:
        """Drop counters that do not exceed a new caller's start value; the number of caller names is unbounded."""
        if len(self._given) >= _MAX_CALLERS:
            self._given = {
                name: given
                for name, given in self._given.items()
                if given > least or name in waiting or name == self._last
            }


class AdapterTurns:
    """Turns of sets of adapters, in rounds: each set with work has one pass of a round.

    A round begins with the set of the pass before, because runners pay for each change of the set, and goes on with
    those that have waited longest. With k sets at work, k - 1 of k passes change the set, and each set has its next
    pass after at most k + 1.
    """

    def __init__(self) -> None:
        self._last: list[AdapterSet] = []  # sets with work, by their last pass, the newest at the end
        self._served: set[AdapterSet] = set()  # those that have had their pass of this round

    def next(self, present: Collection[AdapterSet]) -> AdapterSet:
        """Return the set whose pass is next.

        Args:
            present: the sets with work. Without any, the result is the empty set.
        """
        if not present:
            return ()
        waiting = [one for one in present if one not in self._served]
        if not waiting:
            self._served.clear()
            waiting = [one for one in self._last[-1:] if one in present] or list(present)
        last = [one for one in self._last if one in present]
        turn = min(waiting, key=lambda one: last.index(one) if one in last else -1)
        self._served.add(turn)
        self._last = [*(one for one in last if one != turn), turn]
        return turn
