"""What an engine has to do, as the server sees it: refusals before any work, and when to come again."""

import contextlib
import random
from collections import deque

import pytest

from enginehouse.contract.errors import ModelOverloaded, Overloaded, QueueTimeout
from enginehouse.settings.limits import LimitsSettings
from enginehouse.workers.request_queue import RequestQueue


class Line:
    """A backlog, with a clock of its own."""

    def __init__(self, slots: int = 2, max_queue: int = 8, **more) -> None:
        self.now = 0.0
        self.request_queue = RequestQueue(slots, LimitsSettings(max_queue=max_queue, **more), lambda: self.now)
        self.num = 0

    def enter(self, count: int, caller: str = "", priority: int = 0) -> list[str]:
        names = [f"{caller}{self.num + index}" for index in range(count)]
        self.num += count
        for name in names:
            self.request_queue.enter(name, caller, priority)
        return names

    def serve(self, count: int, pace_s: float) -> None:
        """So many requests come and are served one after the other."""
        for _ in range(count):
            (name,) = self.enter(1)
            self.request_queue.start(name)
            self.now += pace_s
            self.request_queue.leave(name, is_served=True)

    def refusal(self, caller: str = "", priority: int = 0, queue_timeout_s: float | None = None) -> Overloaded:
        with pytest.raises(Overloaded) as refused:
            self.request_queue.check(caller, priority, queue_timeout_s)
        return refused.value


def test_a_request_more_than_slots_and_queue_hold_is_refused() -> None:
    line = Line(slots=2, max_queue=3)
    line.enter(4)
    line.request_queue.check("", 0, None)
    (last,) = line.enter(1)
    assert "queue of this model is full" in line.refusal().message
    line.request_queue.leave(last)

    line.request_queue.check("", 0, None)


def test_who_fills_the_queue_is_told_so_and_others_that_the_model_is_busy() -> None:
    """429 means "you", 503 means "not you"."""
    line = Line(slots=2, max_queue=8, max_queue_per_key=8)
    line.enter(9, "alice")
    line.enter(1, "bob")

    assert type(line.refusal("alice")) is Overloaded
    assert type(line.refusal("bob")) is ModelOverloaded
    assert type(line.refusal("carol")) is ModelOverloaded


def test_one_caller_cannot_fill_the_queue() -> None:
    line = Line(slots=2, max_queue=8)
    line.enter(2 + 6, "alice")  # the slots and three quarters of the queue
    assert type(line.refusal("alice")) is Overloaded

    line.request_queue.check("bob", 0, None)


def test_the_share_of_a_caller_is_a_setting() -> None:
    line = Line(slots=2, max_queue=8, max_queue_per_key=1)
    line.enter(3, "alice")
    assert type(line.refusal("alice")) is Overloaded
    line.enter(3, "bob")

    line.request_queue.check("carol", 0, None)


def test_callers_that_are_not_distinguished_may_fill_it() -> None:
    line = Line(slots=2, max_queue=8)
    line.enter(9)
    line.request_queue.check("", 0, None)


def test_when_to_come_again_is_the_time_for_half_of_what_waits() -> None:
    line = Line(slots=1, max_queue=20)
    assert line.request_queue.retry_after_s == 1.0  # nothing is known yet
    line.serve(20, pace_s=0.5)
    line.enter(21)
    for name in ("20",):
        line.request_queue.start(name)

    assert line.refusal().retry_after_s == pytest.approx((20 / 2 + 1) * 0.5, rel=0.15)


def test_the_pace_is_that_of_late() -> None:
    line = Line(slots=1, max_queue=4)
    line.serve(20, pace_s=0.1)
    fast = line.request_queue.retry_after_s
    line.serve(20, pace_s=5.0)

    assert fast < 0.15 and line.request_queue.retry_after_s == pytest.approx(5.0, rel=0.15)


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    line = Line(slots=1, max_queue=100)
    line.enter(0)
    line.serve(20, pace_s=1.0)
    running, *_ = line.enter(6)
    line.request_queue.start(running)
    line.request_queue.check("", 0, 8.0)
    refusal = line.refusal(queue_timeout_s=4.0)

    assert type(refusal) is ModelOverloaded and "4 s" in refusal.message
    assert refusal.retry_after_s == pytest.approx(6 - 4, rel=0.5)
    line.request_queue.check("", 0, None)  # without a limit it may wait


def overload(line: Line, slots: int, answer_s: float, jitter: float, queue_timeout_s: float) -> tuple[int, int]:
    """Four times the requests that the slots can serve, for 300 s: how many were served and how many too late."""
    chance = random.Random(0)
    waiting: deque[tuple[float, str]] = deque()
    running: list[tuple[float, str]] = []
    num_served = num_late = 0
    next_s = 0.0
    while line.now < 300:
        line.now += 0.02
        for end in [end for end in running if end[0] <= line.now]:
            running.remove(end)
            line.request_queue.leave(end[1], is_served=True)
            num_served += 1
        while waiting and line.now - waiting[0][0] >= queue_timeout_s:
            _, name = waiting.popleft()
            line.request_queue.explain(QueueTimeout("late"), name)
            line.request_queue.leave(name)
            num_late += 1
        while next_s <= line.now:
            next_s += chance.expovariate(4 * slots / answer_s)
            with contextlib.suppress(ModelOverloaded):
                line.request_queue.check("", 0, queue_timeout_s)
                waiting += [(line.now, name) for name in line.enter(1)]
        while waiting and len(running) < slots:
            _, name = waiting.popleft()
            line.request_queue.start(name)
            running.append((line.now + answer_s * chance.uniform(1 - jitter, 1 + jitter), name))
    return num_served, num_late


@pytest.mark.parametrize("jitter", [0.0, 0.5])
@pytest.mark.parametrize("queue_timeout_s", [3.0, 8.0, 12.0])
def test_few_wait_in_vain_and_the_slots_stay_busy(jitter: float, queue_timeout_s: float) -> None:
    """Of answers that end together half begin later than the pace says."""
    line = Line(slots=8, max_queue=200)
    num_served, num_late = overload(line, slots=8, answer_s=5.0, jitter=jitter, queue_timeout_s=queue_timeout_s)

    assert num_late <= 0.04 * num_served  # the first of them while the pace is unknown
    assert num_served >= 0.95 * 300 * 8 / 5


def test_one_late_spell_is_forgotten() -> None:
    line = Line(slots=1, max_queue=200)
    line.serve(20, pace_s=1.0)
    running, late = line.enter(2)
    line.request_queue.start(running)
    line.now += 60.0
    line.request_queue.start(late)
    line.request_queue.leave(running)
    assert "may need" in line.refusal(queue_timeout_s=4.0).message
    line.request_queue.leave(late)
    line.serve(60, pace_s=1.0)
    line.enter(1)

    line.request_queue.check("", 0, 4.0)


def test_callers_in_turn_wait_for_their_turns_only() -> None:
    line = Line(slots=1, max_queue=200)
    line.serve(20, pace_s=1.0)
    running, *_ = line.enter(100, "alice")
    line.request_queue.start(running)

    line.request_queue.check("bob", 0, 5.0)
    assert "may need 10" in line.refusal("alice", queue_timeout_s=5.0).message


def test_urgent_requests_do_not_wait_for_others() -> None:
    line = Line(slots=1, max_queue=200)
    line.serve(20, pace_s=1.0)
    running, *_ = line.enter(50, priority=0)
    line.request_queue.start(running)

    line.request_queue.check("", -1, 5.0)
    line.refusal(priority=0, queue_timeout_s=5.0)


def test_what_little_was_asked_does_not_count_as_what_can_be_done() -> None:
    """One client at a time says little about eight at once: a burst after it must not be refused."""
    line = Line(slots=8, max_queue=200)
    line.serve(30, pace_s=4.0)
    line.enter(40)

    line.request_queue.check("", 0, 5.0)
    assert line.request_queue.retry_after_s > 1.0  # the best guess there is


def test_while_the_pace_is_unknown_nobody_is_refused_for_it() -> None:
    line = Line(slots=1, max_queue=200)
    line.enter(100)
    line.request_queue.check("", 0, 0.001)


def test_time_outs_in_the_worker_s_queue_say_when_to_come_again() -> None:
    line = Line(slots=1, max_queue=5)
    line.serve(20, pace_s=2.0)
    (name,) = line.enter(1, "alice")
    explained = line.request_queue.explain(QueueTimeout("It waited too long."), name)

    assert type(explained) is QueueTimeout and explained.message == "It waited too long."
    assert explained.retry_after_s == pytest.approx(3.0, rel=0.2)


def test_prompt_tokens_that_wait_are_bounded() -> None:
    line = Line(slots=1, max_queue=5, max_queue_tokens=10)
    line.serve(20, pace_s=2.0)
    (long,) = line.enter(1, "alice")
    line.request_queue.check_tokens(long, 1000)  # nothing waits: a long prompt may
    (second,) = line.enter(1, "bob")
    with pytest.raises(Overloaded, match="Too many prompt tokens") as refused:
        line.request_queue.check_tokens(second, 1)
    assert refused.value.retry_after_s == pytest.approx(4.0, rel=0.2)
    line.request_queue.start(long)
    line.request_queue.check_tokens(second, 6)
    (third,) = line.enter(1, "carol")
    with pytest.raises(Overloaded):
        line.request_queue.check_tokens(third, 5)

    line.request_queue.check_tokens(third, 4)
    line.request_queue.check_tokens("unknown", 1000)  # it has ended meanwhile


def test_requests_that_wait_for_a_load_count_with_those_that_have_entered() -> None:
    line = Line(slots=2, max_queue=3)
    line.enter(2)
    line.request_queue.check_waiters(2, "too many", 7.0)
    with pytest.raises(ModelOverloaded, match="too many") as refused:
        line.request_queue.check_waiters(3, "too many", 7.0)

    assert refused.value.retry_after_s == 7.0


def test_entering_and_leaving_twice_counts_once() -> None:
    line = Line()
    line.request_queue.enter("a", "", 0)
    line.request_queue.enter("a", "", 0)
    assert len(line.request_queue) == 1
    line.request_queue.leave("a")
    line.request_queue.leave("a", is_served=True)

    assert len(line.request_queue) == 0
