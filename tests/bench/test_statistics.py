"""The only part of the benchmarks that ordinary test runs collect: figures rest on it."""

import numpy as np
import pytest

from .record import Comparison, Key, Record
from .statistics import estimate, estimate_ratio


def test_estimate_is_the_median_and_ignores_one_disturbed_round():
    found = estimate([101.0, 99.0, 100.0, 12.0, 100.5])

    assert found.median == 100.0
    assert (found.low, found.high) == (12.0, 101.0)  # five rounds: the interval is their range
    assert found.num_rounds == 5


def test_estimate_interval_covers_the_true_median_in_about_95_of_100_experiments():
    generator = np.random.default_rng(7)
    num_covered = 0
    for _ in range(200):
        found = estimate(generator.normal(10.0, 1.0, size=15).tolist())
        num_covered += found.low <= 10.0 <= found.high

    assert 180 <= num_covered <= 199


def test_estimate_of_one_round_claims_no_interval():
    found = estimate([3.0])

    assert (found.median, found.low, found.high) == (3.0, 3.0, 3.0)


def test_estimate_refuses_no_rounds():
    with pytest.raises(ValueError, match="at least one round"):
        estimate([])


def test_ratio_pairs_rounds_so_that_a_slow_machine_cancels_out():
    machine_speed = np.array([1.0, 0.5, 0.9, 0.25, 1.0])

    found = estimate_ratio((120 * machine_speed).tolist(), (100 * machine_speed).tolist())

    assert found.low == pytest.approx(1.2)
    assert found.high == pytest.approx(1.2)


@pytest.mark.parametrize(("values", "baseline"), [([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 0.0])])
def test_ratio_refuses_rounds_that_cannot_be_paired(values, baseline):
    with pytest.raises(ValueError, match="Ratios need"):
        estimate_ratio(values, baseline)


@pytest.mark.parametrize(
    ("values", "target_is_upper", "verdict"),
    [
        ([1.1, 1.2, 1.3, 1.2, 1.1], False, "reached"),
        ([0.8, 0.8, 0.9, 0.8, 0.9], False, "missed"),
        ([0.9, 1.1, 1.2, 1.2, 1.1], False, "unclear"),
        ([1.1, 1.2, 1.3, 1.2, 1.1], True, "missed"),
        ([1.1, 1.2, 1.3, 1.2], False, "too few rounds"),
    ],
)
def test_comparison_claims_a_target_only_when_the_interval_leaves_no_doubt(values, target_is_upper, verdict):
    ours, theirs = Key("8 clients", "ours", "tok/s"), Key("8 clients", "theirs", "tok/s")
    record = Record({ours: values, theirs: [1.0] * len(values)})
    comparison = Comparison(ours, theirs, target=1.0, target_is_upper=target_is_upper)

    assert comparison.verdict(record.compare(comparison)) == verdict
