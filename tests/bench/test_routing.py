"""The simulation behind the figures about routing, on a small scale."""

import pytest

from .routing import HELD_OUT, ROUTERS, Workload, simulate


def test_prefixes_that_fit_all_replicas_together_are_computed_rarely():
    """Demand at three quarters of the capacity: each replica alone could keep a tenth of the prefixes."""
    work = Workload(8, 0.75, requests_per_replica=40)
    got = {name: simulate(work, make()) for name, make in ROUTERS.items()}

    assert got["prefix affinity"].cached > 3 * got["power of two"].cached
    assert got["prefix affinity"].mean_first_s < 0.3 * got["power of two"].mean_first_s
    assert got["prefix affinity"].tokens_per_s > 1.4 * got["round robin"].tokens_per_s


def test_one_popular_prefix_does_not_overload_its_replica():
    work = Workload(8, 0.25, skew=2.0, rate=4.0, requests_per_replica=40)
    balanced = simulate(work, ROUTERS["prefix affinity"]())
    not_balanced = simulate(work, ROUTERS["Ray's prefix router"]())

    assert balanced.mean_first_s < 0.2 * not_balanced.mean_first_s


@pytest.mark.parametrize("num_replicas", [3, 30])
def test_limit_of_imbalance_costs_little_where_prefixes_are_equally_popular(num_replicas):
    """Ray's rule has no such limit, so that it is the bound here."""
    work = Workload(num_replicas, 0.75, traffic=HELD_OUT, requests_per_replica=40)
    limited = simulate(work, ROUTERS["prefix affinity"]())
    unlimited = simulate(work, ROUTERS["Ray's prefix router"]())

    assert limited.cached > 0.92 * unlimited.cached
    assert limited.tokens_per_s > 0.92 * unlimited.tokens_per_s


def test_the_same_arguments_give_the_same_times():
    work = Workload(3, 1.0, requests_per_replica=20)
    first, second = (simulate(work, ROUTERS["prefix affinity"]()) for _ in range(2))

    assert (first.mean_first_s, first.tokens_per_s) == (second.mean_first_s, second.tokens_per_s)
