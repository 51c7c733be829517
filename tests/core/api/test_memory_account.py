"""The account of memory that clients make the server keep: shares, refusals, and that everything is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from enginehouse.api.http.admission import EVERYBODY, NOT_RECOGNISED, MemoryAccount, Reservation
from enginehouse.contract.errors import RateLimited, ServerOverloaded
from enginehouse.settings.config import LimitsSettings

MIB = 1024 * 1024
OWNERS = ("alice", "bob", NOT_RECOGNISED, EVERYBODY)


def account(total: int = 2 * MIB, per_key: int | None = None) -> MemoryAccount:
    return MemoryAccount(LimitsSettings(max_client_bytes=total, max_client_bytes_per_key=per_key))


def test_a_key_may_hold_half_and_others_the_rest() -> None:
    memory = account()
    alice, bob = memory.open("alice"), memory.open("bob")
    alice.take(MIB)

    with pytest.raises(RateLimited, match="1048576 of 1048576 bytes") as refused:
        memory.open("alice").take(1)
    assert refused.value.retry_after_s >= 1
    bob.take(MIB)
    with pytest.raises(ServerOverloaded, match="max_client_bytes"):
        memory.open("carol").take(1)
    alice.close()
    memory.open("carol").take(MIB)
    assert memory.refusals == {"key": 1, "server": 1}


def test_without_keys_all_may_be_one_callers() -> None:
    memory = account()
    memory.open(EVERYBODY).take(2 * MIB)

    with pytest.raises(ServerOverloaded):
        memory.open(EVERYBODY).take(1)


def test_those_that_are_not_recognised_have_one_share_together() -> None:
    memory = account(per_key=1000)
    for _ in range(10):
        memory.open().take(100)

    with pytest.raises(RateLimited, match="not recognised"):
        memory.open().take(1)
    memory.open("alice").take(1000)


def test_what_is_refused_is_not_held() -> None:
    memory = account(per_key=10)
    reservation = memory.open("alice")
    reservation.resize(10)
    with pytest.raises(RateLimited):
        reservation.resize(11)

    assert reservation.num_bytes == memory.num_bytes == 10


def test_other_bounds_hold_from_now_on() -> None:
    memory = account()
    held = memory.open("alice")
    held.take(MIB)
    memory.change(LimitsSettings(max_client_bytes=MIB))

    with pytest.raises(RateLimited):
        memory.open("alice").take(1)
    held.close()
    memory.open("alice").take(MIB // 2)


def test_of_answers_that_are_not_read_the_longest_waiting_are_ended() -> None:
    memory, ended = account(), []
    first, second, third = (memory.open("alice") for _ in range(3))
    first.stall(MIB // 2, lambda: ended.append("first"))
    second.stall(MIB // 2, lambda: ended.append("second"))
    assert ended == []
    third.stall(MIB // 4, lambda: ended.append("third"))

    assert ended == ["first"] and memory.num_bytes == 3 * MIB // 4
    second.go_on(0)
    third.stall(MIB + 1, lambda: ended.append("third"))
    assert ended == ["first", "third"] and memory.num_bytes == 0
    assert memory.refusals == {"unread": 2}


def test_nobody_is_ended_for_what_another_key_does_not_read() -> None:
    memory, ended = account(), []
    memory.open("alice").stall(MIB, lambda: ended.append("alice"))
    memory.open("bob").stall(MIB + 1, lambda: ended.append("bob"))

    assert ended == ["bob"]


class Reservations(RuleBasedStateMachine):
    """Any order of what connections and requests do."""

    @initialize()
    def begin(self) -> None:
        self.memory = account(total=MIB, per_key=600_000)
        self.open: list[Reservation] = []

    @rule(owner=st.sampled_from(OWNERS))
    def add(self, owner: str | None) -> None:
        self.open.append(self.memory.open(owner))

    def act(self, index: int, action: str, num_bytes: int, owner: str | None) -> None:
        if not self.open:
            return
        one = self.open[index % len(self.open)]
        before = one.num_bytes
        try:
            if action == "move":
                one.move(owner)
            elif action == "close":
                one.close()
                self.open.remove(one)
            elif action == "stall":
                one.stall(num_bytes, lambda: None)
            else:
                getattr(one, action)(num_bytes)
        except (RateLimited, ServerOverloaded):
            assert one.num_bytes == before

    @rule(
        index=st.integers(0, 50),
        action=st.sampled_from(["take", "take", "give_back", "resize", "move", "stall", "close"]),
        num_bytes=st.integers(0, 700_000),
        owner=st.sampled_from(OWNERS),
    )
    def change(self, index: int, action: str, num_bytes: int, owner: str | None) -> None:
        self.act(index, action, num_bytes, owner)

    @invariant()
    def counts_are_sums(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.num_bytes == sum(one.num_bytes for one in self.open)
            for owner in OWNERS:
                held = sum(one.num_bytes for one in self.open if one.owner == owner)
                assert self.memory.held_by(owner) == held
                assert 0 <= held <= self.memory.share(owner)
            assert self.memory.num_bytes <= MIB

    def teardown(self) -> None:
        for one in getattr(self, "open", []):
            one.close()
            one.close()
        if hasattr(self, "memory"):
            assert self.memory.num_bytes == 0
            assert all(self.memory.held_by(owner) == 0 for owner in OWNERS)


TestReservations = Reservations.TestCase


@given(st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, MIB)), max_size=30))
def test_no_order_of_requests_exceeds_the_bounds(requests: list[tuple[str | None, int]]) -> None:
    memory = account(total=MIB, per_key=400_000)
    for owner, num_bytes in requests:
        try:
            memory.open(owner).take(num_bytes)
        except (RateLimited, ServerOverloaded):
            continue

    assert memory.num_bytes <= MIB
    assert all(memory.held_by(owner) <= memory.share(owner) for owner in OWNERS)
