"""Measures how computing time grows with the size of the input, for tests that limit it.

Processor time of this process is measured, so that other load on the machine has little effect; the rest is handled by
taking the best of several runs, and by measuring again before a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["assert_near_linear", "measure_growth"]

_T = TypeVar("_T")

_MAX_RATIO = 9.0
"""Maximum ratio of the times for 4n and n: linear gives 4, n log n 4.6, n to the power of 1.5 8, a square 16."""

_FLOOR_S = 0.02
"""Shorter times for 4n are not judged."""

_NUM_RUNS = (1, 2, 3)
"""Number of runs of each size, per round of measuring; rounds end once a measurement has passed."""


def measure_growth(
    make: Callable[[int], _T], run: Callable[[_T], object], size: int, num_runs: int = 1
) -> tuple[float, float, float]:
    """Return the processor seconds for inputs of ``size``, 2 and 4 times that, each the best of ``num_runs``.

    Args:
        make: creates an input of a size; not measured.
        run: the measured function.
        size: n.
    """
    first, second, last = (_best(make(times * size), run, num_runs) for times in (1, 2, 4))
    return first, second, last


def assert_near_linear(
    make: Callable[[int], _T], run: Callable[[_T], object], size: int, what: str = "the time"
) -> tuple[float, float, float]:
    """Fail if time grows faster than n log n; return the measurement.

    Raises:
        AssertionError: it grew faster in every measurement.
    """
    for num_runs in _NUM_RUNS:
        times_s = measure_growth(make, run, size, num_runs)
        if times_s[2] < max(_FLOOR_S, _MAX_RATIO * times_s[0]):
            return times_s
    listed = ", ".join(f"{times * size}: {time_s:.3f} s" for times, time_s in zip((1, 2, 4), times_s, strict=True))
    raise AssertionError(f"{what} grows faster than the input: {listed}")


def _best(given: _T, run: Callable[[_T], object], num_runs: int) -> float:
    times_s = []
    for _ in range(num_runs):
        began_s = time.process_time()
        run(given)
        times_s.append(time.process_time() - began_s)
        if times_s[-1] > 1:
            break
    return min(times_s)
