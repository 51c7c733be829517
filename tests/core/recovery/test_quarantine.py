"""The search for the work that kills workers, as a game: deaths in, the culprit out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginehouse.contract.types import EngineRequest
from enginehouse.recovery.quarantine import (
    _MARGIN_FACTOR,
    _MARGIN_TOKENS,
    _MAX_EXCUSED,
    TRANSITIONS,
    Event,
    Quarantine,
)
from enginehouse.recovery.work import _MAX_PAUSE_S, Offences, State, Work


class Piece(Work):
    """Work whose tokens the test counts."""

    num_tokens = 0

    def __init__(self, arrival: int, caller: str = "", num_tokens: int = 0) -> None:
        super().__init__(caller, arrival, EngineRequest(request_id=str(arrival), caller=caller), 1.0)
        self.num_tokens = num_tokens


class Bench:
    """A quarantine and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.offences = Offences(lambda: self.now_s)
        self.quarantine = Quarantine(self.offences)

    def running(self, *pieces: Piece) -> Sequence[Piece]:
        for piece in pieces:
            self.quarantine.entered(piece)
        return pieces

    def states(self, *pieces: Piece) -> list[str]:
        return [piece.state.value for piece in pieces]

    def pass_run(self, piece: Piece) -> None:
        """Its isolation run, without a death."""
        self.quarantine.entered(piece)
        piece.num_tokens += 100_000
        if self.quarantine.progressed(piece):
            self.quarantine.left(piece)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_all_enter_while_nothing_is_quarantined(bench):
    one, two = bench.running(Piece(0), Piece(1))

    assert not bench.quarantine.is_active
    assert bench.states(one, two) == ["running", "running"]
    assert not bench.quarantine.may_enter(one), "it is inside"


def test_quarantined_work_runs_alone_that_that_came_least_far_and_latest_first(bench):
    old, young, late = bench.running(Piece(0, num_tokens=50), Piece(1, num_tokens=3), Piece(2, num_tokens=3))
    assert bench.quarantine.died([old, young, late]) is None
    new = Piece(3)

    assert bench.states(old, young, late, new) == ["quarantined", "quarantined", "quarantined", "waiting"]
    assert [bench.quarantine.may_enter(one) for one in (old, young, late, new)] == [False, False, True, False]
    bench.quarantine.entered(late)
    assert late.state is State.ISOLATED
    assert not any(bench.quarantine.may_enter(one) for one in (old, young, late, new))


def test_work_of_callers_on_record_is_tried_first(bench):
    bench.offences.add("eve")
    running = bench.running(Piece(0, "eve", num_tokens=50), Piece(1, "bob"))
    bench.quarantine.died(running)

    assert bench.quarantine.may_enter(running[0])


def test_work_passes_well_past_its_point_and_the_next_enters_when_it_has_left(bench):
    one, two = bench.running(Piece(0, num_tokens=5), Piece(1, num_tokens=5))
    bench.quarantine.died([one, two])
    bench.quarantine.entered(two)
    two.num_tokens = 5 + _MARGIN_TOKENS - 1
    assert not bench.quarantine.progressed(two)
    two.num_tokens += 1
    assert bench.quarantine.progressed(two)
    assert not bench.quarantine.may_enter(one), "the worker may still be working on the other one"
    bench.quarantine.left(two)
    assert bench.quarantine.may_enter(one)
    assert not bench.quarantine.may_enter(two)
    bench.quarantine.entered(one)
    one.num_tokens += _MARGIN_TOKENS
    assert not bench.quarantine.progressed(one), "nothing else waits for the worker"

    assert not bench.quarantine.is_active
    assert bench.states(one, two) == ["running", "waiting"]
    assert bench.quarantine.may_enter(two)


def test_death_in_an_isolation_run_names_the_culprit_and_clears_the_others(bench):
    one, two, three = bench.running(*(Piece(number, f"caller {number}") for number in range(3)))
    bench.quarantine.died([one, two, three])
    bench.quarantine.entered(three)

    assert bench.quarantine.died([three]) is three
    assert not bench.quarantine.is_active
    assert bench.states(one, two, three) == ["waiting", "waiting", "culprit"]
    assert one.num_quarantines == two.num_quarantines == 0, "it leaves no trace"
    assert [bench.offences.count(f"caller {number}") for number in range(3)] == [0, 0, 1]


def test_work_that_only_waited_in_the_worker_is_not_quarantined(bench):
    one, queued = bench.running(Piece(0), Piece(1))
    bench.quarantine.died([one])

    assert bench.states(one, queued) == ["quarantined", "waiting"]


def test_death_that_had_not_reached_the_isolated_one_accuses_nothing(bench):
    one, two = bench.running(Piece(0), Piece(1))
    bench.quarantine.died([one, two])
    bench.quarantine.entered(two)

    assert bench.quarantine.died([]) is None
    assert bench.states(one, two) == ["quarantined", "quarantined"]
    assert two.num_quarantines == 1


def test_each_quarantine_without_an_explanation_asks_for_more(bench):
    one = Piece(0)
    bench.running(one)
    for number in range(3):
        assert bench.quarantine.died([one]) is None
        bench.quarantine.entered(one)
        one.num_tokens += _MARGIN_TOKENS * _MARGIN_FACTOR**number - 1
        bench.quarantine.progressed(one)
        assert one.state is State.ISOLATED
        one.num_tokens += 1
        bench.quarantine.progressed(one)
        assert one.state is State.RUNNING


def test_quarantined_work_whose_client_leaves_is_an_offence_of_its_caller_when_no_culprit_is_found(bench):
    gone, stays = bench.running(Piece(0, "eve"), Piece(1, "bob"))
    bench.quarantine.died([gone, stays])
    bench.quarantine.over(gone)
    assert bench.offences.count("eve") == 0, "the other one may have done it"
    bench.pass_run(stays)

    assert bench.offences.count("eve") == 1
    assert bench.offences.count("bob") == 0
    assert stays.num_quarantines == 0


def test_quarantined_work_whose_client_leaves_is_no_offence_when_the_culprit_is_found(bench):
    gone, culprit = bench.running(Piece(0, "alice"), Piece(1, "eve"))
    bench.quarantine.died([gone, culprit])
    bench.quarantine.over(gone)
    bench.quarantine.entered(culprit)

    assert bench.quarantine.died([culprit]) is culprit
    assert bench.offences.count("alice") == 0


def test_client_that_left_before_the_death_does_not_hide_its_work(bench):
    """The worker was still tokenizing it."""
    gone, stays = bench.running(Piece(0, "eve"), Piece(1, "bob"))
    bench.quarantine.over(gone)
    bench.quarantine.died([gone, stays])
    assert bench.states(gone, stays) == ["ended", "quarantined"]
    bench.pass_run(stays)

    assert bench.offences.count("eve") == 1


def test_client_that_leaves_during_its_isolation_run_is_found_out_all_the_same(bench):
    one, two = bench.running(Piece(0), Piece(1))
    bench.quarantine.died([one, two])
    bench.quarantine.entered(two)
    bench.quarantine.over(two)
    assert not bench.quarantine.may_enter(one), "the worker still holds the other one"

    assert bench.quarantine.died([two]) is two
    assert one.state is State.WAITING


def test_answered_work_is_cleared(bench):
    (question,) = bench.running(Piece(0, "bob"))
    bench.quarantine.died([question])
    bench.quarantine.entered(question)
    question.is_answered = True
    bench.quarantine.over(question)
    bench.quarantine.left(question)

    assert not bench.quarantine.is_active
    assert bench.offences.count("bob") == 0


def test_death_from_outside_is_held_against_nothing_for_a_while(bench):
    one, two = Piece(0), Piece(1)
    for _ in range(_MAX_EXCUSED):
        bench.running(one, two)
        assert bench.quarantine.died([one, two], from_outside=True) is None
        assert bench.states(one, two) == ["waiting", "waiting"]
    three = Piece(2)
    bench.running(one, two, three)
    assert bench.quarantine.died([one, two, three], from_outside=True) is None
    assert bench.states(one, two, three) == ["quarantined", "quarantined", "waiting"]
    bench.quarantine.entered(two)
    assert bench.quarantine.died([two], from_outside=True) is two, "like any other death"


def test_death_from_outside_does_not_convict_the_isolated_one(bench):
    one, two = bench.running(Piece(0), Piece(1))
    bench.quarantine.died([one, two])
    bench.quarantine.entered(two)

    assert bench.quarantine.died([two], from_outside=True) is None
    assert two.state is State.QUARANTINED
    bench.quarantine.entered(two)
    assert bench.quarantine.died([two]) is two


def test_every_state_is_in_the_table():
    final = {State.CULPRIT, State.ENDED}

    assert set(TRANSITIONS) | final == set(State)
    assert {state for row in TRANSITIONS.values() for state in row.values()} == set(State)


def test_documented_table_is_the_code_s():
    text = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text(encoding="utf-8")
    table = text.partition("| state | event | next state | when |")[2].partition("\n\n")[0]
    documented: dict[State, dict[Event, State]] = {}
    for row in table.splitlines()[2:]:
        name, event, following, _ = (cell.strip() for cell in row.strip("|").split("|"))
        if name:
            state = State(name.partition(" ")[0])
        documented.setdefault(state, {})[Event(event)] = State(following)

    assert documented == TRANSITIONS


# -- the promise -----------------------------------------------------------------------------------


class Played(Piece):
    """Work of the game below.

    Attributes:
        length: tokens of its answer; a question has none.
        kills_at: it kills the worker when it would draw this token; 0 is as soon as the worker works on it.
        kills_after: it kills the worker with this token of each stay.
    """

    kills_at: int | None = None
    kills_after: int | None = None
    length = 0
    num_stay_tokens = 0

    @property
    def is_innocent(self) -> bool:
        return self.kills_at is None and self.kills_after is None

    @property
    def kills_now(self) -> bool:
        return self.num_tokens == self.kills_at or self.num_stay_tokens == self.kills_after


class Game(RuleBasedStateMachine):
    """Callers, culprits, deaths of all kinds, clients that leave; a step gives each piece in the worker a token."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.offences = Offences(lambda: self.now_s)
        self.quarantine = Quarantine(self.offences)
        self.pieces: list[Played] = []
        self.inside: list[Played] = []
        self.num_deaths = 0
        self.num_accidents = 0
        self.num_from_outside = 0

    @rule(
        caller=st.sampled_from(["alice", "bob", "eve"]),
        length=st.integers(0, 60),
        kills_at=st.none() | st.none() | st.integers(0, 60),
        kills_after=st.none() | st.none() | st.none() | st.integers(1, 40),
    )
    def arrive(self, caller: str, length: int, kills_at: int | None, kills_after: int | None) -> None:
        if len(self.pieces) < 12:
            piece = Played(len(self.pieces), caller)
            piece.length = length
            if kills_at is not None and kills_at <= length:
                piece.kills_at = kills_at
            elif kills_after is not None and kills_after <= length // 2:
                piece.kills_after = kills_after
            self.pieces.append(piece)

    @rule()
    def step(self) -> None:
        self.enter()
        self.compute()

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(which=st.integers(0, 11))
    def client_leaves(self, which: int) -> None:
        """Work that is inside stays there for another step."""
        if which < len(self.pieces) and not self.pieces[which].is_over:
            self.quarantine.over(self.pieces[which])

    @precondition(lambda self: self.num_from_outside < _MAX_EXCUSED)
    @rule()
    def kill_from_outside(self) -> None:
        self.enter()
        self.num_from_outside += 1
        self.die(from_outside=True)

    @precondition(lambda self: self.num_accidents < 2 and not self.quarantine.is_active)
    @rule()
    def accident(self) -> None:
        """A crash that is no work's doing; a second one in an isolation run could not be told from a culprit's."""
        self.enter()
        self.num_accidents += 1
        self.die()

    def enter(self) -> None:
        for piece in self.pieces:
            is_outside = piece.state in (State.WAITING, State.QUARANTINED) and not piece.is_over
            if not is_outside or not self.quarantine.may_enter(piece):
                continue
            if piece.state is State.QUARANTINED or self.offences.pause_s(piece.caller) == 0:
                self.quarantine.entered(piece)
                piece.num_stay_tokens = 0
                self.inside.append(piece)

    def compute(self) -> None:
        if any(piece.kills_now for piece in self.inside):
            self.die()
            return
        for piece in list(self.inside):
            if piece.is_over:  # of which the worker is rid now
                self.leave(piece)
            elif piece.num_tokens == piece.length:
                piece.is_answered = True
                self.quarantine.over(piece)
                self.leave(piece)
            else:
                piece.num_tokens += 1
                piece.num_stay_tokens += 1
                if self.quarantine.progressed(piece):
                    self.leave(piece)

    def leave(self, piece: Played) -> None:
        self.inside.remove(piece)
        self.quarantine.left(piece)

    def die(self, *, from_outside: bool = False) -> None:
        self.num_deaths += 1
        culprit = self.quarantine.died(self.inside, from_outside=from_outside)
        self.inside.clear()
        if culprit is not None:
            assert isinstance(culprit, Played)
            assert not culprit.is_innocent

    @invariant()
    def innocents_are_not_refused(self) -> None:
        assert not any(piece.is_innocent and piece.state is State.CULPRIT for piece in self.pieces)

    @invariant()
    def isolated_work_is_alone(self) -> None:
        if any(piece.state is State.ISOLATED for piece in self.pieces):
            assert len(self.inside) == 1

    @invariant()
    def states_agree_with_where_work_is(self) -> None:
        for piece in self.pieces:
            assert (piece in self.inside) == (piece.state in (State.RUNNING, State.ISOLATED))

    @invariant()
    def deaths_are_bounded(self) -> None:
        """Each text that kills costs two workers, more only where it kills later in each stay, or its client leaves."""
        num_late = sum(piece.kills_after is not None for piece in self.pieces)
        num_culprits = sum(not piece.is_innocent for piece in self.pieces)
        others = self.num_accidents + self.num_from_outside
        assert self.num_deaths <= 2 * num_culprits + 4 * num_late + 2 * others

    def teardown(self) -> None:
        """Whatever can finish finishes, in a time that does not depend on others' pauses; culprits are refused."""
        for num_steps in range(20_000):
            if all(piece.state in (State.ENDED, State.CULPRIT) for piece in self.pieces):
                break
            self.step()
            self.now_s += _MAX_PAUSE_S / 50
            if num_steps % 50 == 0:
                self.deaths_are_bounded()
        for piece in self.pieces:
            if not piece.is_over or piece.is_answered:
                assert piece.state is State.CULPRIT or piece.num_tokens == piece.length
                assert piece.state is State.CULPRIT or piece.kills_at is None


TestGame = Game.TestCase
TestGame.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
