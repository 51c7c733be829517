"""Checkpoints of sequences that share beginnings, within a limit, against a list of what was kept."""

from __future__ import annotations

import random

import pytest

from enginehouse_backendkit.checkpoints import Checkpoints


def test_the_last_checkpoint_before_a_length_is_found():
    checkpoints = Checkpoints[str](100)
    for length in (9, 4, 12):  # a state may be kept before one that is there already
        checkpoints.keep(1, length, f"at {length}", 10)

    assert [checkpoints.last_length(1, length) for length in (3, 4, 8, 9, 11, 12, 99)] == [0, 4, 4, 9, 9, 12, 12]
    assert checkpoints.last_length(2, 99) == 0
    assert checkpoints.all(1) == [(4, "at 4"), (9, "at 9"), (12, "at 12")]
    assert checkpoints.saved(1, 12) == [(4, "at 4"), (9, "at 9")], "the state at the end is saved anyway"
    assert checkpoints.state(1, 9) == "at 9"
    with pytest.raises(KeyError, match="no checkpoint at 8"):
        checkpoints.state(1, 8)


def test_the_least_recently_used_leave_first():
    """Of all sequences that share them at once; going back to one, or asking for one that is there, is a use."""
    checkpoints = Checkpoints[int](30)
    for length in (1, 2, 3):
        checkpoints.keep(1, length, length, 10)
    checkpoints.share(1, 2, 3)
    assert checkpoints.num_bytes == 30
    assert checkpoints.has(2, 1)
    checkpoints.state(1, 2)
    checkpoints.keep(2, 8, 8, 10)

    assert [length for length, _ in checkpoints.all(1)] == [1, 2]
    assert [length for length, _ in checkpoints.all(2)] == [1, 2, 8]
    checkpoints.keep(1, 5, 5, 31)
    assert checkpoints.last_length(1, 5) == 2, "a state that is larger than the limit is not kept"
    checkpoints.keep(1, 6, 6, 30)
    assert (checkpoints.all(1), checkpoints.all(2), checkpoints.num_bytes) == ([(6, 6)], [], 30)


def test_any_order_of_operations_keeps_the_count_of_bytes():
    """Without a limit that matters: every sequence has what it kept and shared, and the bytes are those of all."""
    choose, checkpoints = random.Random(3), Checkpoints[object](10**6)
    held: dict[int, dict[int, object]] = {}
    for handle in range(1, 400):
        sequence = choose.choice([*held, handle])
        own, length = held.setdefault(sequence, {}), choose.randrange(1, 20)
        match choose.choice(("keep", "keep", "cut", "share", "free")):
            case "keep" if not checkpoints.has(sequence, length):
                own[length] = object()
                checkpoints.keep(sequence, length, own[length], 7)
            case "cut":
                held[sequence] = {at: state for at, state in own.items() if at <= length}
                checkpoints.cut(sequence, length)
            case "share" if handle not in held:
                held[handle] = {at: state for at, state in own.items() if at <= length}
                checkpoints.share(sequence, handle, length)
            case "free":
                checkpoints.free(sequence)
                del held[sequence]
        assert all(dict(checkpoints.all(one)) == states for one, states in held.items())
        assert checkpoints.num_bytes == 7 * len({id(state) for states in held.values() for state in states.values()})
