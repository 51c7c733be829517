"""The search for the request that kills workers, as a game: deaths in, the culprit out."""

from __future__ import annotations

from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.replay.probation import _MARGIN_FACTOR, _MARGIN_TOKENS, _MAX_FORGIVEN, Probation


@define(eq=False)
class Request:
    """One that kills its worker with token number ``fatal``."""

    arrival: int
    num_tokens: int = 0
    num_suspicions: int = 0
    num_forgiven: int = 0
    fatal: int | None = None


def test_everybody_may_enter_while_nobody_is_under_suspicion():
    probation = Probation()

    assert probation.trial is None
    assert probation.admits(Request(0))


def test_suspects_are_tried_alone_the_least_far_and_latest_first():
    old, young, late = Request(0, num_tokens=50), Request(1, num_tokens=3), Request(2, num_tokens=3)
    probation = Probation()

    assert probation.died([old, young, late]) is None
    assert probation.trial is late
    assert [probation.admits(one) for one in (old, young, late, Request(3))] == [False, False, True, False]


def test_suspect_passes_well_past_its_point_and_steps_aside_for_the_next():
    one, two = Request(0, num_tokens=5), Request(1, num_tokens=5)
    probation = Probation()
    probation.died([one, two])
    two.num_tokens = 5 + _MARGIN_TOKENS - 1
    assert not probation.progressed(two)
    two.num_tokens += 1
    assert probation.progressed(two)
    assert probation.trial is one
    assert not probation.admits(two)
    one.num_tokens += _MARGIN_TOKENS
    assert not probation.progressed(one), "nobody else waits for the worker"

    assert probation.trial is None
    assert probation.admits(two)


def test_second_death_alone_names_the_culprit_and_clears_the_others():
    one, two, three = (Request(number) for number in range(3))
    probation = Probation()
    probation.died([one, two, three])

    assert probation.died([three]) is three
    assert probation.trial is None
    assert two.num_suspicions == one.num_suspicions == 1


def test_death_of_a_worker_that_the_suspect_had_not_reached_accuses_nobody():
    one, two = Request(0), Request(1)
    probation = Probation()
    probation.died([one, two])

    assert probation.died([]) is None
    assert probation.trial is two
    assert two.num_suspicions == 1


def test_suspect_that_leaves_makes_way():
    one, two, three = (Request(number) for number in range(3))
    probation = Probation()
    probation.died([one, two, three])
    probation.left(two)
    probation.left(three)
    assert probation.trial is one
    probation.left(one)

    assert probation.trial is None


def test_each_further_suspicion_asks_for_more():
    one = Request(0)
    probation = Probation()
    for number in range(3):
        assert probation.died([one]) is None
        one.num_tokens += _MARGIN_TOKENS * _MARGIN_FACTOR**number - 1
        assert not probation.progressed(one)
        assert probation.trial is one
        one.num_tokens += 1
        probation.progressed(one)
        assert probation.trial is None


def test_death_from_outside_is_held_against_nobody_for_a_while():
    one, two = Request(0), Request(1)
    probation = Probation()
    for _ in range(_MAX_FORGIVEN):
        assert probation.died([one, two], from_outside=True) is None
        assert probation.trial is None
    three = Request(2)
    assert probation.died([one, two, three], from_outside=True) is None
    assert probation.trial is two
    assert three.num_suspicions == 0
    assert probation.died([two], from_outside=True) is two, "like any other death"


def test_death_from_outside_does_not_convict_the_one_on_trial():
    one, two = Request(0), Request(1)
    probation = Probation()
    probation.died([one, two])

    assert probation.died([two], from_outside=True) is None
    assert probation.trial is two
    assert probation.died([two]) is two


def play(requests: list[Request], length: int) -> tuple[list[Request], int]:
    """A server in a nutshell: every step each request in the worker gets a token. Returns culprits and deaths."""
    probation, culprits, num_deaths = Probation(), [], 0
    running = list(requests)
    for _ in range(100_000):
        inside = [request for request in running if probation.admits(request)]
        if not inside:
            break
        if any(request.num_tokens == request.fatal for request in inside):
            num_deaths += 1
            culprit = probation.died(inside)
            if culprit is not None:
                culprits.append(culprit)
                running.remove(culprit)
            continue
        for request in inside:
            request.num_tokens += 1
            if request.num_tokens >= length:
                running.remove(request)
                probation.left(request)
            else:
                probation.progressed(request)
            if request is not probation.trial and not probation.admits(request):
                break
    assert not running, "somebody waits for ever"
    return culprits, num_deaths


@given(
    st.lists(st.one_of(st.none(), st.none(), st.integers(0, 60)), min_size=1, max_size=8),
)
def test_only_culprits_are_refused_and_all_others_are_served(fatal):
    """Requests that die at a token of theirs, always the same one: each costs two workers, none of the others fails."""
    requests = [Request(number, fatal=at) for number, at in enumerate(fatal)]
    culprits, num_deaths = play(requests, length=80)
    poison = [request for request in requests if request.fatal is not None]

    assert sorted(culprits, key=lambda one: one.arrival) == poison
    assert all(request.num_tokens == 80 for request in requests if request.fatal is None)
    assert num_deaths <= 2 * len(poison) + sum(range(len(poison) + 1)), "each is found soon"
