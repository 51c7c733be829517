"""Which saved sequence is brought back, and when none is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginehouse.contract.backend import Span
from enginehouse.engine.disk import DiskTier, Recall, StateFolder
from enginehouse.engine.disk.state_folder import digest
from enginehouse.engine.prefix_cache import PrefixCache
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

TOKENS = (np.arange(200, dtype=np.int32) * 7) % 250


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    runner = FakeRunner(FakeOptions(max_sequences=2, cache_tokens=500))
    tier = DiskTier(runner, StateFolder(tmp_path, digest(b"m"), 10**8, can_cut=True), clock=lambda: 0.0)
    handle = runner.open_sequence()
    runner.forward([Span(handle, 0, TOKENS, "none")])
    assert tier.save(TOKENS, "a", handle)
    runner.free_sequence(handle)
    tier.flush()
    yield tier
    tier.close()


@pytest.fixture
def cache(tier: DiskTier) -> PrefixCache:
    return PrefixCache(tier.runner, save=tier.save)


def test_a_state_comes_back_as_a_kept_prefix(tier: DiskTier, cache: PrefixCache) -> None:
    recall = Recall(tier, cache)
    read = recall.begin(TOKENS[:150], "a", 0)
    assert read is not None
    assert recall.is_over(read, "a", 0, waits=True)
    match = cache.match(TOKENS, "a")

    assert match is not None
    assert match.length == 200
    assert not cache.has_unsaved(1), "it need not be saved again"


def test_prompts_that_begin_alike_share_a_read(tier: DiskTier, cache: PrefixCache) -> None:
    recall = Recall(tier, cache)
    first, second = recall.begin(TOKENS[:150], "a", 0), recall.begin(TOKENS[:160], "a", 0)
    assert first is not None
    assert first is second
    assert recall.is_over(first, "a", 0, waits=True)

    assert recall.is_over(first, "a", 0, waits=False)
    assert len(cache) == 1


@pytest.mark.parametrize(("num_tokens", "namespace", "num_held"), [(63, "a", 0), (150, "b", 0), (150, "a", 100)])
def test_little_to_gain_is_not_worth_a_read(
    tier: DiskTier, cache: PrefixCache, num_tokens: int, namespace: str, num_held: int
) -> None:
    assert Recall(tier, cache).begin(TOKENS[:num_tokens], namespace, num_held) is None


def test_running_sequences_are_not_pushed_out(tier: DiskTier, cache: PrefixCache) -> None:
    handles = [tier.runner.open_sequence(), tier.runner.open_sequence()]
    recall = Recall(tier, cache)
    read = recall.begin(TOKENS, "a", 0)
    assert read is not None
    assert recall.is_over(read, "a", len(handles), waits=True)

    assert len(cache) == 0
