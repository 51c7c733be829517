"""Limits of callers: rates per minute, requests at once, tokens that are reserved and settled. Time is ours."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.api.http.admission import Admission, Ticket
from enginehouse.api.http.admission.gate import Rate, Rates
from enginehouse.contract.errors import RateLimited, ServerOverloaded
from enginehouse.contract.identity import Identity
from enginehouse.settings.config import LimitsSettings
from enginehouse.workers.request_queue import Throughput

ALICE, BOB = Identity(name="alice"), Identity(name="bob")
MINUTE = 60.0


class Clock:
    """Both the time of day, by which the library counts, and the monotonic time."""

    def __init__(self, now: float = 1_700_000_040.0) -> None:  # the beginning of a minute
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


async def enter(admission: Admission, caller: Identity | None) -> Ticket:
    ticket = admission.ticket(caller)
    await admission.enter(ticket)
    return ticket


def requests(per_minute: int, owner: str = "a") -> Rate:
    return Rate(owner=owner, unit="requests", per_minute=per_minute)


async def test_a_rate_is_used_up_and_comes_back(clock: Clock) -> None:
    rates, rate = Rates(), requests(10)
    for _ in range(10):
        assert await rates.wait_s(rate, 1) == 0
        await rates.take(rate, 1)

    wait_s = await rates.wait_s(rate, 1)
    assert MINUTE < wait_s <= MINUTE + 6  # the first of ten fades when a tenth of the next minute is over
    assert (await rates.state(rate)).remaining == 0
    assert (await rates.state(rate)).reset_s == pytest.approx(2 * MINUTE)
    clock.now += wait_s - 0.5
    assert await rates.wait_s(rate, 1) > 0
    clock.now += 0.5 + 1e-3
    assert await rates.wait_s(rate, 1) == 0
    assert await rates.wait_s(requests(10, "b"), 10) == 0  # another owner's is another rate


@settings(max_examples=60, deadline=None)
@given(
    per_minute=st.integers(1, 500),
    steps=st.lists(st.tuples(st.integers(1, 600), st.floats(0, 150)), min_size=1, max_size=12),
)
async def test_the_wait_is_as_long_as_needed_and_hardly_longer(per_minute: int, steps: list) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(time, "time", clock)
        rates, rate = Rates(), requests(per_minute)
        for amount, pause_s in steps:
            wait_s = await rates.wait_s(rate, amount)
            unit_s = 2 * MINUTE / per_minute + 0.01
            if wait_s > unit_s:
                clock.now += wait_s - unit_s
                assert await rates.wait_s(rate, min(amount, per_minute)) > 0
                clock.now += unit_s
            else:
                clock.now += wait_s
            clock.now += 1e-3
            assert await rates.wait_s(rate, amount) == 0
            await rates.take(rate, amount)
            clock.now += pause_s


async def test_no_sixty_seconds_hold_twice_the_limit(clock: Clock) -> None:
    """Not even around the turn of a minute."""
    rates, rate = Rates(), requests(60)
    clock.now += 59
    taken = 0
    for _ in range(200):
        if await rates.wait_s(rate, 1) == 0:
            await rates.take(rate, 1)
            taken += 1
        clock.now += 0.02

    assert taken <= 66


async def test_what_was_reserved_and_not_used_comes_back(clock: Clock) -> None:
    rates, rate = Rates(), Rate(owner="a", unit="tokens", per_minute=1000)
    taken = await rates.take(rate, 900)
    assert (await rates.state(rate)).remaining == 100
    await rates.settle(taken, 150)
    assert (await rates.state(rate)).remaining == 850
    more = await rates.take(rate, 100)
    await rates.settle(more, 400)

    assert (await rates.state(rate)).remaining == 450


async def test_units_of_a_minute_that_is_over_are_not_given_back_twice(clock: Clock) -> None:
    rates, rate = Rates(), Rate(owner="a", unit="tokens", per_minute=1000)
    old = await rates.take(rate, 1000)
    clock.now += 3 * MINUTE
    await rates.take(rate, 500)
    await rates.settle(old, 0)

    assert (await rates.state(rate)).remaining == 500


async def test_more_than_a_minutes_worth_waits_for_a_free_minute(clock: Clock) -> None:
    """Else a long prompt could never be sent; what it used beyond counts afterwards."""
    rates, rate = Rates(), Rate(owner="a", unit="tokens", per_minute=100)
    assert await rates.wait_s(rate, 5000) == 0
    taken = await rates.take(rate, 5000)
    await rates.settle(taken, 250)

    assert (await rates.state(rate)).remaining == 0
    clock.now += 1.5 * MINUTE
    assert await rates.wait_s(rate, 1) > 0  # 250 tokens at 100 per minute


async def test_each_key_has_its_own_rate_and_all_share_the_servers(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_requests_per_minute=2, requests_per_minute=3))
    for caller in (ALICE, ALICE, BOB):
        await admission.close(await enter(admission, caller))

    with pytest.raises(RateLimited, match="This key may use 2 requests per minute") as refused:
        await enter(admission, ALICE)
    assert refused.value.limit == "requests" and refused.value.retry_after_s > 0
    with pytest.raises(RateLimited, match="All callers together may use 3 requests"):
        await enter(admission, BOB)


async def test_a_refused_request_counts_nowhere(clock: Clock) -> None:
    """Neither in its own rate nor in everybody's: else who is refused could keep others out."""
    admission = Admission(LimitsSettings(key_requests_per_minute=1, requests_per_minute=2))
    await enter(admission, ALICE)
    for _ in range(5):
        with pytest.raises(RateLimited, match="This key"):
            await enter(admission, ALICE)

    await enter(admission, BOB)


async def test_what_a_key_says_itself_overrides(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_requests_per_minute=1, key_max_concurrent=1))
    generous = Identity(name="generous", requests_per_minute=3, max_concurrent=3)
    for _ in range(3):
        ticket = await enter(admission, generous)

    assert [(state.rate.per_minute, state.remaining) for state in ticket.states] == [(3, 0)]
    with pytest.raises(RateLimited):
        await enter(admission, generous)


async def test_requests_at_once_are_counted_until_they_end(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_max_concurrent=1, max_concurrent=2), clock)
    first = await enter(admission, ALICE)
    with pytest.raises(RateLimited, match="1 requests running") as refused:
        await enter(admission, ALICE)
    assert refused.value.limit == "concurrent"
    await enter(admission, BOB)
    with pytest.raises(ServerOverloaded, match="2 requests to answer"):
        await enter(admission, Identity(name="carol"))
    await admission.close(first)
    await admission.close(first)  # harmless

    await enter(admission, ALICE)


async def test_other_work_counts_among_the_requests_at_once_only(clock: Clock) -> None:
    """It uses up no rate, and that it ends quickly does not say how soon an answer ends."""
    settings = LimitsSettings(key_requests_per_minute=2, key_tokens_per_minute=5, key_max_concurrent=1)
    admission = Admission(settings, clock)
    for _ in range(5):
        ticket = admission.ticket(ALICE, is_generating=False)
        await admission.enter(ticket)
        assert ticket.states == ()
        await admission.close(ticket)
    held = await enter(admission, ALICE)
    with pytest.raises(RateLimited, match="1 requests running") as refused:
        await admission.enter(admission.ticket(ALICE, is_generating=False))
    assert refused.value.retry_after_s == 1.0  # as when none has ended yet
    await admission.close(held)

    await admission.enter(admission.ticket(ALICE, is_generating=False))


async def test_when_to_come_again_follows_how_fast_requests_end(clock: Clock) -> None:
    admission = Admission(LimitsSettings(max_concurrent=1), clock)
    for _ in range(5):
        ticket = await enter(admission, None)
        clock.now += 4.0
        await admission.close(ticket)
    await enter(admission, None)

    with pytest.raises(ServerOverloaded) as refused:
        await enter(admission, None)
    assert refused.value.retry_after_s == pytest.approx(4.0, rel=0.3)


async def test_tokens_are_reserved_and_settled(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_tokens_per_minute=1000))
    ticket = await enter(admission, ALICE)
    await admission.reserve(ticket, 800)
    assert [state.remaining for state in ticket.states] == [200]
    other = await enter(admission, ALICE)
    with pytest.raises(RateLimited, match="this request asks for about 300") as refused:
        await admission.reserve(other, 300)
    assert refused.value.limit == "tokens"
    ticket.used = 100
    await admission.close(ticket)

    await admission.reserve(other, 300)
    assert [state.remaining for state in other.states] == [600]


async def test_of_several_rates_the_tighter_one_is_shown(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_requests_per_minute=100, requests_per_minute=5))
    ticket = await enter(admission, ALICE)

    assert [(state.rate.per_minute, state.remaining) for state in ticket.states] == [(5, 4)]


async def test_a_refused_request_is_told_what_is_left_and_holds_nothing(clock: Clock) -> None:
    admission = Admission(LimitsSettings(key_requests_per_minute=1, key_max_concurrent=2))
    await enter(admission, ALICE)
    refused = admission.ticket(ALICE)
    with pytest.raises(RateLimited):
        await admission.enter(refused)
    await admission.close(refused)
    assert [(state.rate.per_minute, state.remaining) for state in refused.states] == [(1, 0)]

    clock.now += 2 * MINUTE
    await enter(admission, ALICE)  # the second of two: the refused one does not count


async def test_limits_can_be_changed(clock: Clock) -> None:
    admission = Admission(LimitsSettings())
    assert (await enter(admission, ALICE)).states == ()
    admission.change(LimitsSettings(key_max_concurrent=1))
    with pytest.raises(RateLimited):
        await enter(admission, ALICE)


async def test_callers_without_requests_are_forgotten(clock: Clock) -> None:
    admission = Admission(LimitsSettings(), clock)
    for number in range(5000):
        await admission.close(await enter(admission, Identity(name=f"caller-{number}")))

    assert admission.num_owners <= 4097


def test_throughput_counts_busy_time_only() -> None:
    clock = Clock(0.0)
    throughput = Throughput(clock)
    assert throughput.per_s is None
    for _ in range(5):
        throughput.run(True)
        clock.now += 2.0
        throughput.count()
        throughput.run(False)
        clock.now += 100.0

    assert throughput.per_s == pytest.approx(0.5, rel=0.2)


def test_throughput_follows_what_changes() -> None:
    clock = Clock(0.0)
    throughput = Throughput(clock)
    throughput.run(True)
    for pause_s in [1.0] * 60 + [0.1] * 600:
        clock.now += pause_s
        throughput.count()

    assert throughput.per_s == pytest.approx(10.0, rel=0.15)
    assert math.isfinite(throughput.per_s)


async def test_of_several_rates_that_are_used_up_the_longer_wait_is_told(clock: Clock) -> None:
    """Who comes back when one of them has room again would only be refused by the other."""
    admission = Admission(LimitsSettings(key_requests_per_minute=60))
    for _ in range(60):
        await admission.close(await enter(admission, ALICE))
    admission.change(LimitsSettings(key_requests_per_minute=60, requests_per_minute=1))
    clock.now += MINUTE  # from now on one of them comes back each second
    await enter(admission, BOB)
    with pytest.raises(RateLimited) as refused:
        await enter(admission, ALICE)

    clock.now += refused.value.retry_after_s
    await enter(admission, ALICE)
