"""Which inputs a pass has: priority, short before bulk, turns of callers, tokens, and no starvation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput
from enginehouse.contract.types import PoolingRequest
from enginehouse.engine.pooling.inputs import PoolInputs
from enginehouse.engine.pooling.queue import PoolQueue, empty_rows

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
