"""Turns of sets of adapters: rounds, few changes of the set, and bounded waits while sets come and go."""

from __future__ import annotations

import random

from enginehouse.contract.adapters import AdapterSet
from enginehouse.engine.turns import AdapterTurns

A, B, C, D = (((handle, 1.0),) for handle in range(1, 5))


def test_a_round_has_every_set_and_begins_with_the_one_in_force() -> None:
    turns = AdapterTurns()

    assert [turns.next([A, B, C, D]) for _ in range(12)] == [A, B, C, D, D, A, B, C, C, D, A, B]


def test_two_sets_change_in_every_second_pass() -> None:
    turns = AdapterTurns()

    assert [turns.next([(), A]) for _ in range(8)] == [(), A, A, (), (), A, A, ()]


def test_a_new_set_is_next_and_one_without_work_is_left_out() -> None:
    turns = AdapterTurns()
    first = [turns.next([A, B]) for _ in range(3)]

    assert first == [A, B, B]
    assert [turns.next([A, B, C]) for _ in range(3)] == [C, A, A]
    assert [turns.next([B, C]) for _ in range(4)] == [B, C, C, B]
    assert turns.next([]) == ()
    assert turns.next([A]) == A


def test_no_set_waits_longer_than_a_round_of_the_sets_at_work() -> None:
    """Over random sets that come and go, of which at most four are at work at once."""
    randomness, turns = random.Random(3), AdapterTurns()
    present: list[AdapterSet] = [A]
    waited: dict[AdapterSet, int] = {}
    for _ in range(2000):
        if randomness.random() < 0.1:
            present = randomness.sample([(), A, B, C, D], randomness.randint(1, 4))
            waited = {one: passes for one, passes in waited.items() if one in present}
        turn = turns.next(present)
        waited = {one: 0 if one == turn else waited.get(one, 0) + 1 for one in present}

        assert turn in present and max(waited.values()) <= 2 * len({(), A, B, C, D})
