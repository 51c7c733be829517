"""The circuit breaker, and the average time to the first token."""

from __future__ import annotations

import pytest

from enginehouse.pipeline.routing.circuit_breaker import CircuitBreaker
from enginehouse.settings.optimisations import RouterSettings


def test_circuit_opens_after_failures_in_a_row_and_closes_later() -> None:
    now = [0.0]
    circuit_breaker = CircuitBreaker(RouterSettings(max_failures=2, pause_s=10), lambda: now[0])
    circuit_breaker.failed("m")
    assert not circuit_breaker.has_failed("m")
    circuit_breaker.failed("m")
    assert circuit_breaker.has_failed("m")
    assert not circuit_breaker.has_failed("other")
    now[0] = 10.0
    assert not circuit_breaker.has_failed("m")  # half open: the next request may try
    circuit_breaker.failed("m")
    assert circuit_breaker.has_failed("m")
    now[0] = 20.0
    circuit_breaker.answered("m", 0.1)
    circuit_breaker.failed("m")
    assert not circuit_breaker.has_failed("m")  # failures are counted anew after an answer


@pytest.fixture
def half_open() -> tuple[CircuitBreaker, list[float]]:
    """The model ``m`` has failed, and its pause is over; and the clock."""
    now = [0.0]
    circuit_breaker = CircuitBreaker(RouterSettings(max_failures=1, pause_s=10), lambda: now[0])
    circuit_breaker.failed("m")
    now[0] = 10.0
    assert not circuit_breaker.has_failed("m")
    return circuit_breaker, now


def test_after_the_pause_one_request_tries_and_the_others_go_on_without(
    half_open: tuple[CircuitBreaker, list[float]],
) -> None:
    circuit_breaker, _ = half_open
    test = circuit_breaker.begin("m")
    assert circuit_breaker.has_failed("m")
    circuit_breaker.begin("m").ended()  # nothing else was left for that one
    assert circuit_breaker.has_failed("m")
    test.answered()
    assert not circuit_breaker.has_failed("m")


def test_test_that_fails_opens_the_circuit_for_another_pause(half_open: tuple[CircuitBreaker, list[float]]) -> None:
    circuit_breaker, now = half_open
    test = circuit_breaker.begin("m")
    test.failed()
    test.failed()  # said of the generation, and of the attempt
    now[0] = 19.9
    assert circuit_breaker.has_failed("m")
    now[0] = 20.0
    assert not circuit_breaker.has_failed("m")


def test_test_that_is_given_up_lets_the_next_request_try(half_open: tuple[CircuitBreaker, list[float]]) -> None:
    circuit_breaker, _ = half_open
    given_up = circuit_breaker.begin("m")
    given_up.ended()
    assert not circuit_breaker.has_failed("m")
    circuit_breaker.begin("m")
    given_up.ended()  # said twice: the test is another request's now
    assert circuit_breaker.has_failed("m")


def test_test_that_never_ends_is_waited_for_no_longer_than_a_pause(
    half_open: tuple[CircuitBreaker, list[float]],
) -> None:
    circuit_breaker, now = half_open
    hanging = circuit_breaker.begin("m")
    now[0] = 19.9
    assert circuit_breaker.has_failed("m")
    now[0] = 20.0
    assert not circuit_breaker.has_failed("m")
    second = circuit_breaker.begin("m")
    hanging.ended()
    assert circuit_breaker.has_failed("m")
    second.answered()
    assert not circuit_breaker.has_failed("m")


def test_without_a_pause_no_circuit_opens() -> None:
    circuit_breaker = CircuitBreaker(RouterSettings(max_failures=1, pause_s=0), lambda: 0.0)
    circuit_breaker.failed("m")
    circuit_breaker.begin("m")
    assert not circuit_breaker.has_failed("m")


def test_beginning_closes_the_circuit_and_breaking_off_after_it_is_a_failure() -> None:
    now = [0.0]
    circuit_breaker = CircuitBreaker(RouterSettings(max_failures=1, pause_s=10), lambda: now[0])
    trial = circuit_breaker.begin("m")
    now[0] = 0.5
    trial.answered()
    assert circuit_breaker.first_token_s("m") == 0.5
    trial.failed()
    assert circuit_breaker.has_failed("m")


def test_times_are_averaged_with_the_newest_counting_most() -> None:
    circuit_breaker = CircuitBreaker(RouterSettings())
    assert circuit_breaker.first_token_s("m") is None
    circuit_breaker.answered("m", 1.0)
    assert circuit_breaker.first_token_s("m") == 1.0
    for _ in range(50):
        circuit_breaker.answered("m", 0.1)
    assert circuit_breaker.first_token_s("m") == pytest.approx(0.1, rel=0.01)
