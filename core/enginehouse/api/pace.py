"""When the text of an answer leaves: the time to its first piece, and the gaps between the following ones.

Runs once per batch of events, so gaps are counted in buckets at once instead of being kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left

__all__ = ["GAP_BUCKETS_S", "Pace"]

GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds; one more bucket holds what is longer."""


class Pace:
    """Of one request.

    Attributes:
        first_s: seconds from the request's arrival to its first text; None before it.
        gap_counts: how many gaps fell into each bucket.
        gaps_s: their sum.
    """

    __slots__ = ("_began", "_last", "first_s", "gap_counts", "gaps_s")

    def __init__(self, began: float) -> None:
        self.first_s: float | None = None
        self.gap_counts = [0] * (len(GAP_BUCKETS_S) + 1)
        self.gaps_s = 0.0
        self._began = began
        self._last = 0.0

    def mark(self) -> None:
        """Some text has left, or been kept for the whole answer, just now."""
        now = time.perf_counter()
        if self.first_s is None:
            self.first_s = now - self._began
        else:
            gap = now - self._last
            self.gap_counts[bisect_left(GAP_BUCKETS_S, gap)] += 1
            self.gaps_s += gap
        self._last = now
