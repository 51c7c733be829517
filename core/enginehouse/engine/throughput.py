"""Throughput measured over the busy time; ``Retry-After`` is computed from it."""

from __future__ import annotations

import time
from collections.abc import Callable

_HALF_LIFE_S = 15.0
_MIN_COUNT = 3
"""Minimum number of events for an estimate of the rate."""


class Throughput:
    """Events per second of busy time, exponentially weighted with a half-life of 15 s.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None  # None while idle
        self._count = 0.0
        self._busy_s = 0.0
        self._num_seen = 0

    def run(self, is_busy: bool) -> None:
        """Set whether there is work from now on."""
        self._advance()
        self._began_s = self._clock() if is_busy else None

    def count(self) -> None:
        """Count one finished event."""
        self._advance()
        self._count += 1
        self._num_seen += 1

    @property
    def per_s(self) -> float | None:
        """Events per second; None until enough events are counted."""
        self._advance()
        if self._num_seen < _MIN_COUNT or self._busy_s <= 0:
            return None
        return self._count / self._busy_s

    def _advance(self) -> None:
        """Advance the busy time to now and decay earlier counts and time."""
        if self._began_s is None:
            return
        now = self._clock()
        passed_s, self._began_s = now - self._began_s, now
        share = 0.5 ** (passed_s / _HALF_LIFE_S)
        self._count *= share
        self._busy_s = self._busy_s * share + passed_s
