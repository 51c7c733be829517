"""What a decode step costs by how many tokens it computes, learned from the steps that happen anyway.

Used to choose how many drafted tokens are worth computing. Seconds are measured on this machine, under whatever load it
has now, and only their ratios matter.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque

from attrs import define, field

__all__ = ["StepCosts"]

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
"""Numbers of tokens that are told apart; a step belongs to the next larger one."""

_NUM_KEPT = 7  # the median of so many steps forgets a disturbance
_MAX_AGE = 512  # steps after which a size is taken for unknown again: machines get busier and idler
_HOPE = 0.15  # what a further token is thought to cost, as a share of a token's part of the steps that are known


@define(eq=False)
class _Size:
    seconds: deque[float] = field(factory=lambda: deque(maxlen=_NUM_KEPT))
    last_step: int = 0


class StepCosts:
    """Seconds of a step by its number of tokens.

    Between sizes that were seen costs are interpolated. Beyond them they are hoped to be low, so that a size is tried
    when it would pay if that were so; from then on it is known.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._known: list[tuple[int, float]] = []  # sizes with their seconds, both rising
        self._known_at = 0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so much time."""
        self._num_steps += 1
        if num_tokens > _SIZES[-1] or seconds <= 0.0:
            return
        size = self._sizes.setdefault(_size_of(num_tokens), _Size())
        if self._num_steps - size.last_step > _MAX_AGE:
            size.seconds.clear()
        size.seconds.append(seconds)
        size.last_step = self._num_steps

    @property
    def is_known(self) -> bool:
        """Whether estimates are seconds."""
        return bool(self._look())

    def estimate(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens will take; in arbitrary units before the first step."""
        known = self._look()
        if not known:
            return _hoped(num_tokens)
        below = [pair for pair in known if pair[0] <= num_tokens]
        above = [pair for pair in known if pair[0] > num_tokens]
        if not below:
            size, seconds = known[0]
            return seconds * _hoped(num_tokens) / _hoped(size)
        size, seconds = below[-1]
        if above:
            next_size, next_seconds = above[0]
            share = (num_tokens - size) / (next_size - size)
            return seconds + share * max(0.0, next_seconds - seconds)
        return seconds * (1.0 + _HOPE * (num_tokens - size) / size)

    def _look(self) -> list[tuple[int, float]]:
        """What is known now; looked up once per step, for many lengths are weighed."""
        if self._known_at == self._num_steps:
            return self._known
        known: list[tuple[int, float]] = []
        for size in sorted(self._sizes):
            entry = self._sizes[size]
            if self._num_steps - entry.last_step <= _MAX_AGE:
                seconds = statistics.median(entry.seconds)
                known.append((size, max(seconds, known[-1][1]) if known else seconds))
        self._known, self._known_at = known, self._num_steps
        return known


def _hoped(num_tokens: int) -> float:
    """What a step is thought to cost while nothing of it is known; one token costs 1."""
    return 1.0 + _HOPE * (num_tokens - 1)


def _size_of(num_tokens: int) -> int:
    return _SIZES[bisect_left(_SIZES, num_tokens)]
