"""Which inputs a pass has: priority, short before bulk, turns of callers, tokens, and no starvation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve

from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput
from enginehouse.contract.types import PoolingRequest
from enginehouse.engine.pooling.inputs import PoolInputs
from enginehouse.engine.pooling.loop import PoolEngine
from enginehouse.engine.pooling.queue import PassLength, PoolQueue, empty_rows
from enginehouse_testkit.fake_pooler import FakePooler

LIMITS = PoolerCapabilities(max_tokens=50, max_batch_tokens=60, max_batch_texts=4, pass_tokens=20, dimensions=1)


def made(lengths: Sequence[int], caller: str = "", priority: int = 0) -> PoolInputs:
    """A request with different inputs of these lengths."""
    inputs = [PoolerInput(np.full(length, place, np.int32)) for place, length in enumerate(lengths)]
    request = PoolingRequest(task="embed", inputs=(), caller=caller, priority=priority)
    keys = [bytes([place]) for place in range(len(lengths))]
    return PoolInputs(request, inputs, keys, np.arange(len(lengths)), tuple(lengths), 0)


def queue(*requests: PoolInputs) -> PoolQueue:
    """A queue with requests, whose calls are 0, 1, ..."""
    found = PoolQueue(LIMITS)
    for call, one in enumerate(requests):
        found.add(call, one, empty_rows(one, 1), range(len(one.inputs)))
    return found


def passes(found: PoolQueue, most: int = 99) -> list[list[tuple[int, int]]]:
    """Compute until nothing is left; for each pass, the call and length of its inputs."""
    done = []
    while (chosen := found.next_pass()) is not None and len(done) < most:
        done.append([(job.call, len(one.token_ids)) for job, one in zip(chosen.jobs, chosen.inputs, strict=True)])
        found.computed(chosen, np.ones((len(chosen.jobs), 1), np.float32))
    return done


def test_passes_keep_the_limits_and_begin_with_the_longest() -> None:
    """An input that is longer than a usual pass has one of its own; short ones fill the room that is left."""
    assert passes(queue(made([3, 30, 12, 9, 5, 5, 2]))) == [
        [(0, 30)],
        [(0, 12), (0, 5), (0, 3)],
        [(0, 9), (0, 5), (0, 2)],
    ]
    assert [len(one) for one in passes(queue(made([1] * 8)))] == [4, 4]


def test_short_requests_come_before_bulk_but_each_fourth_pass_is_one_of_bulk() -> None:
    bulk = made([15] * 9)
    order = [one[0][0] for one in passes(queue(bulk, *(made([15]) for _ in range(7))))]

    assert order[:8] == [1, 2, 3, 0, 4, 5, 6, 0]
    assert order[8:] == [7, *[0] * 7]


def test_lower_priorities_come_first() -> None:
    assert [one[0][0] for one in passes(queue(made([15], priority=1), made([15] * 9)))] == [*[1] * 9, 0]


def test_callers_take_turns_by_the_tokens_they_got() -> None:
    """One caller has many requests, the other one a few: they alternate; its later requests wait for neither."""
    many = [made([15], "many") for _ in range(4)]
    order = [one[0][0] for one in passes(queue(*many, made([15], "few"), made([15], "few")))]

    assert order == [0, 4, 1, 5, 2, 3]


def test_short_requests_share_a_pass() -> None:
    assert passes(queue(made([5]), made([8, 2]), made([4]))) == [[(1, 8), (0, 5), (2, 4), (1, 2)]]


def test_a_request_that_was_dropped_in_its_pass_is_not_complete() -> None:
    found = queue(made([5]), made([5]))
    chosen = found.next_pass()
    assert chosen is not None
    found.remove(0)

    assert [job.call for job in found.computed(chosen, np.ones((2, 1), np.float32))] == [1]
    assert len(found) == 0


@pytest.mark.parametrize(
    ("token_s", "expected"),
    [
        (0.00001, [256, 512, 1024, 2048, 2048]),  # as long as the pooler allows
        (0.0005, [256, 500, 500, 500, 500]),
        (0.1, [256, 256, 256, 256, 256]),  # not shorter, which would cost more per token
    ],
)
def test_passes_are_as_long_as_a_quarter_of_a_second_of_work(token_s: float, expected: list[int]) -> None:
    """Full passes at a constant time per token."""
    length = PassLength(evolve(LIMITS, max_batch_tokens=4096, pass_tokens=2048))
    found = []
    for _ in expected:
        found.append(length.num_tokens)
        length.record(length.num_tokens, length.num_tokens * token_s)

    assert found == expected


def test_lengths_of_passes_follow_the_machine() -> None:
    """One slow pass halves the length, and one fast pass restores it; a pass that is far from full changes nothing."""
    length = PassLength(evolve(LIMITS, max_batch_tokens=1024, pass_tokens=None))
    steps = [(256, 0.01, 512), (512, 0.01, 1024), (1024, 9.0, 512), (200, 9.0, 512), (5, 0.01, 512), (300, 0.05, 1024)]

    for num_tokens, seconds, expected in steps:
        length.record(num_tokens, seconds)
        assert length.num_tokens == expected


def test_time_that_small_passes_take_too_does_not_shorten_others() -> None:
    """Beside busy programs a pass of any length may take seconds, so that short passes would only lower the rate."""
    length = PassLength(evolve(LIMITS, max_batch_tokens=4096, pass_tokens=2048))
    for _ in range(30):
        length.record(15, 2.0)
        length.record(length.num_tokens, 2.0 + 0.0001 * length.num_tokens)

    assert length.num_tokens == 2048


def test_an_adapted_length_bounds_the_next_pass() -> None:
    found = PoolQueue(evolve(LIMITS, max_batch_tokens=1000, max_batch_texts=100, pass_tokens=None))
    bulk = made([16] * 40)
    found.add(0, bulk, empty_rows(bulk, 1), range(40))
    first = found.next_pass()
    assert first is not None
    found.computed(first, np.ones((len(first.jobs), 1), np.float32))
    found.length.record(first.num_tokens, 0.2)

    assert first.num_tokens == 256
    assert [len(one) for one in passes(found)] == [20, 4]


@pytest.mark.parametrize("is_known", [False, True])
def test_no_pass_begins_for_a_request_that_is_being_cancelled(is_known: bool) -> None:
    """Its cancellation came when no pass could be aborted: before the request was added, or before its first pass."""
    pooler = FakePooler()
    engine = PoolEngine(pooler)
    if not is_known:
        engine.interrupt(1)
    engine.add(1, made([3]))
    if is_known:
        engine.interrupt(1)

    assert engine.step() == [] and pooler.num_passes == 0 and engine.has_work()
    engine.cancel(1)
    assert not engine.has_work()
    engine.add(2, made([3]))
    assert [call for call, _ in engine.step()] == [2] and pooler.num_passes == 1
