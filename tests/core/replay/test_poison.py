"""Refused requests are known again, whoever sends them, and forgotten after a while."""

from __future__ import annotations

import msgspec

from enginehouse.replay.poison import _MAX_REMEMBERED, _REMEMBERED_S, Poison
from enginehouse.types import EngineRequest, SamplingParams, Segment


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(text: str, **fields) -> EngineRequest:
    return EngineRequest(request_id="a", segments=(Segment(text),), **fields)


def test_the_same_request_is_known_again_by_what_is_computed():
    poison = Poison(Clock())
    bad = request("drink this", sampling=SamplingParams(seed=1))
    assert bad not in poison
    poison.add(bad)

    assert bad in poison
    other_names = {"request_id": "b", "caller": "eve", "namespace": "n", "priority": 3, "queue_timeout_s": 1.0}
    assert msgspec.structs.replace(bad, **other_names, sampling=SamplingParams(seed=2)) in poison
    assert request("drink that") not in poison
    assert msgspec.structs.replace(bad, num_choices=2) not in poison


def test_refusals_are_forgotten():
    clock = Clock()
    poison = Poison(clock)
    poison.add(request("bad"))
    clock.now_s = _REMEMBERED_S - 1
    assert request("bad") in poison
    clock.now_s = _REMEMBERED_S
    assert request("bad") not in poison


def test_memory_is_bounded_and_the_oldest_go_first():
    poison = Poison(Clock())
    for number in range(_MAX_REMEMBERED + 1):
        poison.add(request(f"bad {number}"))

    assert request("bad 0") not in poison
    assert request("bad 1") in poison
