"""Fair queueing between callers, by a virtual token counter for each.

A caller that was idle starts at the minimum of the waiting callers, so idle time earns no credit. Used by the scheduler
of generations and the queue of pooling requests.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["FairShares"]

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
