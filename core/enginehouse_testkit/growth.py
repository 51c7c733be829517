"""Measures how computing time grows with the size of the input, for tests that limit it.

Processor time of this process is measured, so that other load on the machine has little effect; the rest is handled by
taking the best of several runs, and by measuring again before a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["assert_near_linear"]

_T = TypeVar("_T")

_MAX_RATIO = 9.0
"""Maximum ratio of the times for 4n and n: linear gives 4, n log n 4.6, n to the power of 1.5 8, a square 16."""

_FLOOR_S = 0.02
"""Shorter times for 4n are not judged."""

_NUM_RUNS = (1, 2, 3)
"""Number of runs of each size, per round of measuring; rounds end once a measurement has passed."""


def assert_near_linear(
    make: Callable[[int], _T], run: Callable[[_T], object], size: int, what: str = "the time"
) -> float:
    """Fail if time grows faster than n log n; return the processor seconds for an input of 4 times ``size``.

    Args:
        make: creates an input of a size; not measured.
        run: the measured function.
        size: n.
        what: subject of the message.

    Raises:
        AssertionError: it grew faster in every measurement.
    """
    for num_runs in _NUM_RUNS:
        last_s = _best(make(4 * size), run, num_runs)
        if last_s < _FLOOR_S:
            return last_s
        first_s = _best(make(size), run, num_runs)
        if last_s < _MAX_RATIO * first_s:
            return last_s
    raise AssertionError(f"{what} grows faster than the input: {size}: {first_s:.3f} s, {4 * size}: {last_s:.3f} s")


def _best(given: _T, run: Callable[[_T], object], num_runs: int) -> float:
    times_s = []
    for _ in range(num_runs):
        began_s = time.process_time()
        run(given)
        times_s.append(time.process_time() - began_s)
        if times_s[-1] > 1:
            break
    return min(times_s)
