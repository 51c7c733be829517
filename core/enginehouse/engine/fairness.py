"""Whose turn it is: callers that wait share the engine by what they have been given, not by who sent most.

Each caller has a count of tokens that were computed for it; of those that wait, the one with the least is next. Who
comes after a pause is lifted to the least of those that wait, so a pause saves nothing up. Knows no sequences.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the virtual token counter. Ours counts
prompt tokens when a sequence starts and generated ones when the next choice is made, or when the sequence leaves.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["FairShares"]

_PROMPT_WEIGHT = 1
_ANSWER_WEIGHT = 2
"""A generated token costs about two of a prompt; the paper's weights, which are those of usual prices."""

_MAX_CALLERS = 1024


class FairShares:
    """What each caller has been given, in weighted tokens."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._last: str | None = None  # who started last

    def of(self, caller: str) -> float:
        """What a caller has been given; the least is next."""
        return self._given.get(caller, 0.0)

    def arrive(self, caller: str, waiting: Collection[str]) -> None:
        """A request of ``caller`` begins to wait beside those of ``waiting``."""
        if caller in waiting:
            return
        if waiting:
            least = min(self.of(other) for other in waiting)
        else:
            least = self.of(self._last) if self._last is not None else 0.0
        self._forget(least, waiting)
        self._given[caller] = max(self.of(caller), least)

    def start(self, caller: str, num_tokens: int) -> None:
        """A sequence of ``caller`` starts; so many tokens of its prompt must be computed."""
        self._given[caller] = self.of(caller) + _PROMPT_WEIGHT * num_tokens
        self._last = caller

    def generated(self, caller: str, num_tokens: int) -> None:
        """So many tokens were generated for ``caller``."""
        self._given[caller] = self.of(caller) + _ANSWER_WEIGHT * num_tokens

    def _forget(self, least: float, waiting: Collection[str]) -> None:
        """Drop the counts that say no more than a new caller's would: names may be ever new ones."""
        if len(self._given) >= _MAX_CALLERS:
            self._given = {
                name: given
                for name, given in self._given.items()
                if given > least or name in waiting or name == self._last
            }
