"""The radix tree of kept sequences against the plainest possible model: a list of token lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.backend import Span
from enginehouse.engine.prefix_cache import PrefixCache, common_prefix_length
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner


class WholeRunner(FakeRunner):
    """Does not say what a cut keeps, as runners need not."""

    kept_length = None  # type: ignore[assignment]


def make_cache(
    fork: str = "share", window: int | None = None, window_slack: int = 0, kind: type[FakeRunner] = FakeRunner
) -> tuple[FakeRunner, PrefixCache]:
    options = FakeOptions(fork=fork, window=window, window_slack=window_slack, max_sequences=64)  # type: ignore[arg-type]
    runner = kind(options)
    return runner, PrefixCache(runner)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def keep(runner: FakeRunner, cache: PrefixCache, values: list[int], namespace: str = "") -> None:
    handle = runner.open_sequence()
    runner.forward([Span(handle, 0, ids(values), "none")])
    cache.store(ids(values), handle, namespace)


def num_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(stored=st.lists(st.tuples(token_lists, st.sampled_from(["", "a"])), max_size=8), query=token_lists)
@pytest.mark.parametrize("fork", ["share", "copy", "none"])
def test_match_is_the_longest_beginning_that_was_stored(fork: str, stored: list, query: list[int]) -> None:
    runner, cache = make_cache(fork)
    before = runner.free_tokens()
    for values, namespace in stored:
        keep(runner, cache, values, namespace)
    expected = max((num_shared(values, query) for values, namespace in stored if namespace == ""), default=0)
    match = cache.match(ids(query), "")

    assert (match.length if match else 0) == expected
    if match:
        handle, length = cache.open(match)
        assert length == expected == runner.length(handle)
        replayed = runner.open_sequence()
        runner.forward([Span(replayed, 0, ids(query[:length]), "none")])
        rows = runner.forward([Span(handle, length, ids([7])), Span(replayed, length, ids([7]))]).host()
        assert np.array_equal(rows[0], rows[1]), "the reused positions must hold these very tokens"
        runner.free_sequence(handle)
        runner.free_sequence(replayed)
    cache.clear()
    assert runner.free_tokens() == before
    assert len(cache) == cache.num_tokens == 0


@settings(max_examples=100, deadline=None)
@given(stored=st.lists(token_lists, max_size=8), query=token_lists)
@pytest.mark.parametrize(("fork", "kind"), [("share", WholeRunner), ("none", FakeRunner)])
def test_a_runner_that_plans_no_cuts_reuses_whole_sequences_only(
    fork: str, kind: type[FakeRunner], stored: list[list[int]], query: list[int]
) -> None:
    """Nor does one without forks: a cut would be paid for with the sequence."""
    runner, cache = make_cache(fork, window=4, window_slack=6, kind=kind)
    for values in stored:
        keep(runner, cache, values)
    whole = [len(values) for values in stored if query[: len(values)] == values]
    match = cache.match(ids(query), "")

    assert (match.length if match else 0) == max(whole, default=0)


@settings(max_examples=150, deadline=None)
@given(stored=st.lists(token_lists, max_size=8), query=token_lists, slack=st.sampled_from([0, 1, 3, 20]))
@pytest.mark.parametrize("fork", ["share", "copy"])
def test_with_a_window_the_sequence_is_taken_that_really_keeps_most(
    fork: str, stored: list[list[int]], query: list[int], slack: int
) -> None:
    window = 3
    runner, cache = make_cache(fork, window, slack)
    for values in stored:
        keep(runner, cache, values)

    def reused(values: list[int]) -> int:
        length = num_shared(values, query)
        num_lost = max(0, len(values) - window - slack)
        return length if length == len(values) or max(0, length - window) >= num_lost else 0

    num_open, expected = len(runner.sequences), max(map(reused, stored), default=0)
    match = cache.match(ids(query), "")

    assert (match.length if match else 0) == expected
    assert len(runner.sequences) == num_open, "nothing is opened to find out"
    if match:
        handle, length = cache.open(match)
        replayed = runner.open_sequence()
        runner.forward([Span(replayed, 0, ids(query[:length]), "none")])
        rows = runner.forward([Span(handle, length, ids([7])), Span(replayed, length, ids([7]))]).host()
        assert length == expected
        assert np.array_equal(rows[0], rows[1]), "the reused positions must hold these very tokens"


def test_with_a_window_a_shorter_sequence_may_serve_where_the_longest_cannot() -> None:
    """The longest shares six tokens, but has forgotten them; another shares four, and still knows them."""
    runner, cache = make_cache(window=3, window_slack=2)
    keep(runner, cache, [1, 2, 3, 4, 5, 6, *[9] * 12])
    keep(runner, cache, [1, 2, 3, 4, 8])
    keep(runner, cache, [1, 2])
    matches = [cache.match(ids(query), "") for query in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 7])]

    assert [match.length for match in matches if match is not None] == [4, 2]
    assert len(cache) == 3, "what a cut needs may be gone tomorrow, so the short ones stay"


def test_a_longer_sequence_makes_its_beginning_redundant() -> None:
    runner, cache = make_cache()
    keep(runner, cache, [1, 2, 3])
    keep(runner, cache, [1, 2, 3, 4])
    keep(runner, cache, [1, 2])

    assert len(cache) == 1
    assert cache.num_tokens == 4


def test_the_least_recently_used_goes_first_and_the_kept_one_stays() -> None:
    runner, cache = make_cache()
    for values in ([1, 1], [2, 2], [3, 3]):
        keep(runner, cache, values)
    oldest = cache.match(ids([1, 1]), "")
    assert oldest is not None

    assert cache.evict()
    assert cache.match(ids([2, 2]), "") is None
    assert cache.evict(keep=oldest)
    assert not cache.evict(keep=oldest)
    assert cache.match(ids([1, 1]), "") is not None


def test_a_namespace_whose_sequences_are_gone_leaves_nothing_behind() -> None:
    """Clients choose namespaces, so there may be any number of them."""
    runner, cache = make_cache()
    for number in range(100):
        keep(runner, cache, [1, 2, number], f"salt {number}")
        keep(runner, cache, [1, 2], f"salt {number}")
        while len(cache) > 3:
            cache.evict()

    known = {n for n in range(100) if cache.divergence(ids([1, 9]), f"salt {n}") is not None}
    assert known == {97, 98, 99}


def test_common_prefix_length() -> None:
    assert common_prefix_length(ids([]), ids([1])) == 0
    assert common_prefix_length(ids([1, 2, 3]), ids([1, 2])) == 2
    assert common_prefix_length(ids([1, 2, 3]), ids([1, 9, 3])) == 1


def test_divergence_is_where_a_prompt_leaves_what_is_kept() -> None:
    runner, cache = make_cache()
    keep(runner, cache, [1, 2, 3, 4, 5])
    keep(runner, cache, [1, 2, 3, 9, 9, 9])
    keep(runner, cache, [7, 7], "other")

    def found(*token_ids: int, namespace: str = "") -> tuple[int, int | None] | None:
        divergence = cache.divergence(ids(list(token_ids)), namespace)
        return None if divergence is None else (divergence.index, divergence.expected)

    assert found(1, 2, 3, 4, 6) == (4, 5), "inside an edge"
    assert found(1, 2, 6) == (2, 3)
    assert found(1, 2, 3, 6) == (3, 9), "at a fork: what was used last"
    assert found(1, 2, 3, 4, 5, 6) == (5, None), "it goes on where the kept one ends"
    assert found(1, 2, 3) is None
    assert found(7, 8) == (0, 1), "what other namespaces keep is unknown here"
    assert found(7, 8, namespace="empty") is None


def test_what_is_evicted_is_saved_once() -> None:
    saved: list[tuple[list[int], str]] = []

    def save(token_ids: np.ndarray, namespace: str, handle: int) -> bool:
        assert runner.length(handle) == len(token_ids)
        saved.append((token_ids.tolist(), namespace))
        return len(saved) > 1

    runner = FakeRunner(FakeOptions(max_sequences=64))
    cache = PrefixCache(runner, save=save)
    keep(runner, cache, [1, 2, 3])
    keep(runner, cache, [1, 2, 4], "a")

    assert cache.has_unsaved(3)
    assert not cache.has_unsaved(4)
    assert not cache.save_next(3), "put off"
    assert cache.save_next(3)
    assert saved == [([1, 2, 4], "a")] * 2, "the last used first"
    while cache.evict():
        pass
    assert saved[2:] == [([1, 2, 3], "")]
