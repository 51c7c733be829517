"""What a token costs on the disk and in the model."""

from __future__ import annotations

import pytest

from enginehouse.engine.disk.tier import DiskCosts, SecondsPerToken


def test_an_average_follows_what_is_measured() -> None:
    cost = SecondsPerToken()
    assert cost.estimate(10) is None
    cost.observe(100, 1.0)
    assert cost.estimate(10) == pytest.approx(0.1)
    for _ in range(30):
        cost.observe(100, 2.0)

    assert cost.estimate(10) == pytest.approx(0.2, rel=0.01)


def test_loading_pays_when_it_is_quicker_or_unknown() -> None:
    pace = DiskCosts()
    assert pace.pays(1000, 10)
    pace.loading.observe(1000, 0.1)
    assert pace.pays(1000, 10)
    pace.computing.observe(1000, 2.0)

    assert pace.pays(1000, 51)
    assert not pace.pays(1000, 49)
