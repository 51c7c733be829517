"""When the text of an answer leaves: the time to its first piece, and the gaps between the following ones.

A mark is set for every batch of events, so it is one look at the clock; gaps are counted when the answer has ended.
"""

from __future__ import annotations

from array import array
from time import perf_counter

import numpy as np

__all__ = ["GAP_BUCKETS_S", "Pace"]

GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds; one more bucket holds what is longer."""


class Pace:
    """Of one request.

    Args:
        began: ``time.perf_counter()`` of its arrival.
    """

    __slots__ = ("_began", "_marks")

    def __init__(self, began: float) -> None:
        self._began = began
        self._marks = array("d")

    def mark(self) -> None:
        """Some text has left, or been kept for the whole answer, just now."""
        self._marks.append(perf_counter())

    @property
    def first_s(self) -> float | None:
        """Seconds from the request's arrival to its first text; None before it."""
        return self._marks[0] - self._began if self._marks else None

    def gaps(self) -> tuple[list[int], float]:
        """How many gaps fell into each bucket, and their sum in seconds."""
        gaps_s = np.diff(np.frombuffer(self._marks)) if self._marks else np.empty(0)
        buckets = np.searchsorted(GAP_BUCKETS_S, gaps_s)
        counts: list[int] = np.bincount(buckets, minlength=len(GAP_BUCKETS_S) + 1).tolist()
        return counts, float(gaps_s.sum())
