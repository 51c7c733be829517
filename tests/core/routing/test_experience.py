"""The circuit breaker, and the average time to the first token."""

from __future__ import annotations

import pytest

from enginehouse.router_settings import RouterSettings
from enginehouse.routing.experience import Experience


def test_model_is_left_aside_after_failures_in_a_row_and_tried_again_later() -> None:
    now = [0.0]
    experience = Experience(RouterSettings(max_failures=2, pause_s=10), lambda: now[0])
    experience.failed("m")
    assert not experience.has_failed("m")
    experience.failed("m")
    assert experience.has_failed("m")
    assert not experience.has_failed("other")
    now[0] = 10.0
    assert not experience.has_failed("m")  # half open: the next request may try
    experience.failed("m")
    assert experience.has_failed("m")
    now[0] = 20.0
    experience.answered("m", 0.1)
    experience.failed("m")
    assert not experience.has_failed("m")  # failures are counted anew after an answer


def test_times_are_averaged_with_the_newest_counting_most() -> None:
    experience = Experience(RouterSettings())
    assert experience.first_token_s("m") is None
    experience.answered("m", 1.0)
    assert experience.first_token_s("m") == 1.0
    for _ in range(50):
        experience.answered("m", 0.1)
    assert experience.first_token_s("m") == pytest.approx(0.1, rel=0.01)
