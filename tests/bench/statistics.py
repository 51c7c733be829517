"""Medians and 95 % intervals of a few interleaved rounds. Knows numbers only, not what they measure.

Rounds are the unit: machines drift over minutes, so values of one round are compared with each other
(paired) and the uncertainty comes from resampling whole rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

__all__ = ["Estimate", "estimate", "estimate_ratio"]

_NUM_RESAMPLES = 10_000


@frozen
class Estimate:
    """A median over rounds and where it lies with 95 % confidence.

    With five rounds or fewer the interval is simply the lowest and the highest round: so few values cannot say more.
    """

    median: float
    low: float
    high: float
    num_rounds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Median of the rounds' values, with the percentile bootstrap interval of that median.

    The resampling is seeded, so the same values always give the same interval.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("An estimate needs at least one round.")
    rounds = np.asarray(values, np.float64)
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(rounds), size=(_NUM_RESAMPLES, len(rounds)))
    medians = np.median(rounds[drawn], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Estimate(float(np.median(rounds)), float(low), float(high), len(rounds))


def estimate_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate of ``values / baseline``, round by round: what slows a whole round down cancels out.

    Raises:
        ValueError: the rounds cannot be paired, or a baseline is not positive.
    """
    if len(values) != len(baseline):
        raise ValueError(f"Ratios need paired rounds; got {len(values)} and {len(baseline)}.")
    if any(number <= 0 for number in baseline):
        raise ValueError("Ratios need positive baselines.")
    return estimate([value / base for value, base in zip(values, baseline, strict=True)])
