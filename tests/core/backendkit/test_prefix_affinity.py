"""The rule of prefix-aware routing, against a plain model of it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from enginehouse_backendkit.prefix_affinity import (
    BLOCK_BYTES,
    MAX_BLOCKS_OF_PROMPT,
    PrefixAffinity,
    PrefixChoice,
    prefix_blocks,
)


def text(*words: str) -> str:
    """One block per word."""
    return "".join(word.ljust(BLOCK_BYTES, ".") for word in words)


def chain(*words: str) -> tuple[int, ...]:
    return prefix_blocks([text(*words)])


@given(st.text(max_size=1500), st.lists(st.integers(0, 1500), max_size=4))
def test_blocks_do_not_depend_on_how_a_prompt_is_divided(prompt: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(prompt)]
    parts = [prompt[start:end] for start, end in itertools.pairwise(edges)]

    assert prefix_blocks(parts) == prefix_blocks([prompt.encode()])
    assert len(prefix_blocks(parts)) == len(prompt.encode()) // BLOCK_BYTES


def test_blocks_are_equal_exactly_as_far_as_prompts_are() -> None:
    one, two = chain("system", "question", "more"), chain("system", "other", "more")

    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    assert not set(one) & set(prefix_blocks([text("system", "question", "more")], namespace="other"))
    assert prefix_blocks(["short"]) == ()
    assert len(prefix_blocks(["long" * BLOCK_BYTES * MAX_BLOCKS_OF_PROMPT])) == MAX_BLOCKS_OF_PROMPT


def test_blocks_are_the_same_in_every_process() -> None:
    code = f"from enginehouse_backendkit.prefix_affinity import *; print(prefix_blocks(['ab' * {BLOCK_BYTES}], 'ns'))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == str(prefix_blocks(["ab" * BLOCK_BYTES], "ns"))


CASES = {
    "the least busy one that has it": (chain("a", "b", "c"), [0, 1, 2], PrefixChoice(1, "prefix", 2)),
    "the one with more of it": (chain("a", "b", "x", "y"), [0, 4, 3], PrefixChoice(2, "prefix", 4)),
    "less of it where the best is too busy": (chain("a", "b", "x", "y"), [0, 3, 15], PrefixChoice(1, "prefix", 2)),
    "another where all that have it are too busy": (
        chain("a", "b", "c"),
        [0, 19, 19],
        PrefixChoice(0, "balance", 0),
    ),
    "8 more than the mean of the others": (chain("a", "b", "x", "y"), [1, 3, 10], PrefixChoice(2, "prefix", 4)),
    "two deviations": (chain("a", "b", "x", "y"), [99, 101, 120], PrefixChoice(2, "prefix", 4)),
    "more than two deviations": (chain("a", "b", "x", "y"), [99, 101, 121], PrefixChoice(1, "prefix", 2)),
    "too little of it": (chain("a", "k", "l", "m"), [1, 2, 2], PrefixChoice(0, "load", 0)),
    "an excluded one": (chain("a", "b", "c"), [2, math.inf, 3], PrefixChoice(2, "prefix", 2)),
    "excluded ones are not busy ones": (chain("a", "b"), [2, math.inf, math.inf], PrefixChoice(0, "load", 0)),
    "nothing of it: the emptiest": (chain("z"), [0, 0, 0], PrefixChoice(0, "load", 0)),
    "nothing of it: the emptiest that is no busier than the mean": (chain("z"), [2, 1, 0], PrefixChoice(1, "load", 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_choice(case: str) -> None:
    blocks, loads, expected = CASES[case]
    affinity = PrefixAffinity()
    affinity.learn(1, chain("a", "b"))
    affinity.learn(2, chain("a", "b", "x", "y"))

    assert affinity.choose(blocks, loads) == expected


def test_prompts_without_blocks_take_turns_between_the_least_busy() -> None:
    affinity = PrefixAffinity()

    assert sorted(affinity.choose((), [0, 0, 1, 0]).index for _ in range(6)) == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("count", [2, 3, 8, 50])
def test_one_prefix_for_all_prompts_does_not_stay_on_a_part_of_the_replicas(count: int) -> None:
    """Thirty running requests for each, none of which ends: no replica has more than two deviations above the mean."""
    affinity, loads = PrefixAffinity(), [0.0] * count
    for number in range(30 * count):
        blocks = chain("system", f"{number}")
        index = affinity.choose(blocks, loads).index
        affinity.learn(index, blocks)
        loads[index] += 1

    assert max(loads) <= 30 + 2 * math.sqrt(30) + 1


def test_a_returning_replica_gets_its_share_of_new_prompts_and_not_all() -> None:
    affinity, loads = PrefixAffinity(), [10.0] * 4
    for number in range(40):
        affinity.learn(number % 4, chain(f"old {number}"))
    affinity.forget(3)
    loads[3] = 0
    for number in range(10):
        loads[affinity.choose(chain(f"new {number}"), loads).index] += 1

    assert loads == [10, 10, 10, 10]


def test_a_forgotten_replica_has_nothing() -> None:
    affinity = PrefixAffinity()
    affinity.forget(-1)
    affinity.learn(1, chain("a", "b"))
    affinity.forget(1)
    affinity.forget(7)

    assert affinity.choose(chain("a", "b"), [0, 0]).reason == "load"
    assert len(affinity) == 0


@pytest.mark.parametrize("loads", [[], [math.inf], [math.inf, math.inf]])
def test_nothing_to_choose_from_is_an_error(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="no replica can be chosen"):
        PrefixAffinity().choose((), loads)


def test_invalid_values_are_refused() -> None:
    for values in ({"min_share": 0}, {"min_share": 1.5}, {"slack": -1}, {"deviations": -1}, {"max_blocks": 10}):
        with pytest.raises(ValueError, match=next(iter(values))):
            PrefixAffinity(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        PrefixAffinity().learn(-1, ())


WORDS = st.lists(st.sampled_from("abc"), max_size=6).map(lambda words: chain(*words))


class Replicas(RuleBasedStateMachine):
    """Prompts of few words, so that most of them share blocks; small limits, so that blocks are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.affinity = PrefixAffinity(blocks_per_replica=9, max_blocks=MAX_BLOCKS_OF_PROMPT)
        self.sent: dict[int, list[tuple[int, ...]]] = {}

    @rule(index=st.integers(0, 3), blocks=WORDS)
    def learn(self, index: int, blocks: tuple[int, ...]) -> None:
        self.affinity.learn(index, blocks)
        self.sent.setdefault(index, []).append(blocks)
        loads = [math.inf] * 4
        loads[index] = 0

        assert self.affinity.choose(blocks, loads).matched == len(blocks)

    @rule(index=st.integers(0, 3))
    def forget(self, index: int) -> None:
        self.affinity.forget(index)
        self.sent.pop(index, None)

    @rule(blocks=WORDS, loads=st.lists(st.sampled_from([0, 1, 5, 20, math.inf]), min_size=1, max_size=4))
    def choose(self, blocks: tuple[int, ...], loads: list[float]) -> None:
        if min(loads) == math.inf:
            return
        choice, least = self.affinity.choose(blocks, loads), min(loads)

        assert choice == self.affinity.choose(blocks, loads) or not blocks
        usable = [load for load in loads if load != math.inf]
        load, mean = loads[choice.index], sum(usable) / len(usable)
        others = (sum(usable) - load) / max(1, len(usable) - 1)
        assert load == least or load <= 1e-9 + others + max(8, 2 * math.sqrt(others))
        # What is said to match was sent there, at one time.
        assert not choice.matched or any(
            sent[: choice.matched] == blocks[: choice.matched] for sent in self.sent[choice.index]
        )
        if choice.reason == "prefix":
            assert choice.matched >= 0.3 * len(blocks)
        else:
            assert load <= mean

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.affinity) <= 4 * 9


Replicas.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestReplicas = Replicas.TestCase


def test_memory_is_bounded_in_all() -> None:
    affinity = PrefixAffinity(max_blocks=1000)
    for number in range(300):
        affinity.learn(number % 50, chain(*(f"{number}-{block}" for block in range(40))))

        assert len(affinity) <= 1000
