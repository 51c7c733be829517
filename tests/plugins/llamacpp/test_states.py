"""Saved sequences: the same logits in another runner, and nothing wrong ever reaches llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from enginehouse.contract.backend import Outputs, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, write_head
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.states import num_checked_bytes, pack_checkpoints, state_array, unpack_checkpoints

from .hybrid_models import write_hybrid

pytestmark = pytest.mark.llamacpp

Open = Callable[..., LlamaCppRunner]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12


def feed(runner: LlamaCppRunner, sequence: int, token_ids: list[int], outputs: Outputs = "last") -> np.ndarray:
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), outputs)
    return runner.forward([span]).host().copy()


def holding(runner: LlamaCppRunner, token_ids: list[int]) -> int:
    sequence = runner.open_sequence()
    for start in range(0, len(token_ids), 64):
        feed(runner, sequence, token_ids[start : start + 64], "none")
    return sequence


@pytest.fixture
def two(smollm_path: Path, open_runner: Open) -> Iterator[tuple[LlamaCppRunner, LlamaCppRunner]]:
    runners = [open_runner(smollm_path, context=256, cache_tokens=300, threads=1, n_batch=64) for _ in range(2)]
    yield runners[0], runners[1]
    for runner in runners:
        runner.close()


def test_another_runner_goes_on_with_equal_logits(two: tuple[LlamaCppRunner, LlamaCppRunner]) -> None:
    """As after a restart; into a cache that is in use, and whose cells were moved and freed."""
    first, second = two
    token_ids = first.tokenizer.encode(TEXT, False)[:100]
    saved = holding(first, token_ids)
    data = first.save(saved)
    others = [holding(second, token_ids[at : at + 40]) for at in (20, 40, 60)]
    second.free_sequence(others[1])
    loaded = second.load(memoryview(bytes(data)))  # as a file gives it, not writable

    assert second.length(loaded) == 100
    for token_id in (5, 6, 7):
        assert np.array_equal(feed(second, loaded, [token_id]), feed(first, saved, [token_id]))
    assert np.array_equal(feed(second, others[2], [9]), feed(second, holding(second, token_ids[60:100]), [9])), (
        "others are as they were"
    )


def test_states_of_other_settings_are_refused(
    two: tuple[LlamaCppRunner, LlamaCppRunner], smollm_path: Path, open_runner: Open
) -> None:
    data = two[0].save(holding(two[0], list(range(20, 60))))
    other = open_runner(smollm_path, context=256, cache_tokens=300, threads=1, n_batch=64, type_v="q8_0")
    with pytest.raises(StateRefused, match="other settings"):
        other.load(data)
    other.close()


def test_every_damage_of_the_first_part_is_refused(two: tuple[LlamaCppRunner, LlamaCppRunner]) -> None:
    """There stand the positions, on which llama.cpp relies."""
    first, second = two
    data = bytearray(first.save(holding(first, list(range(20, 60)))))
    for place in range(HEAD_BYTES + 64 + 12 * 40):
        damaged = data.copy()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(StateRefused):
            second.load(memoryview(damaged))

    assert second.length(second.load(memoryview(data))) == 40


def test_what_llama_cpp_itself_refuses_changes_nothing(two: tuple[LlamaCppRunner, LlamaCppRunner]) -> None:
    """A right head before data of another shape, as a file of another model would have it."""
    first, second = two
    saved = holding(first, list(range(20, 60)))
    data = bytearray(first.save(saved))
    for size in (HEAD_BYTES + 100, HEAD_BYTES + 800, len(data) // 2, len(data) - 1):
        shorter = memoryview(bytearray(data[:size]))
        write_head(shorter, second.state_format, 40, num_checked=num_checked_bytes(40))
        free_tokens = second.free_tokens()
        with pytest.raises(StateRefused):
            second.load(shorter)
        assert second.free_tokens() == free_tokens
    loaded = second.load(memoryview(data))

    assert np.array_equal(feed(second, loaded, [5]), feed(first, saved, [5]))


def test_a_full_cache_loads_nothing(two: tuple[LlamaCppRunner, LlamaCppRunner]) -> None:
    first, second = two
    token_ids = first.tokenizer.encode(TEXT, False)
    data = first.save(holding(first, token_ids[:100]))
    taken = holding(second, (token_ids * 2)[:240])
    with pytest.raises(CacheFull):
        second.load(data)
    second.free_sequence(taken)

    assert second.length(second.load(data)) == 100


def test_parked_tokens_are_saved_too(smollm_path: Path, open_runner: Open) -> None:
    """Sequences that nobody uses are moved out of the cells."""
    runner = open_runner(smollm_path, context=256, cache_tokens=1024, threads=1, n_batch=64)
    token_ids = runner.tokenizer.encode(TEXT, False)[:100]
    kept = holding(runner, token_ids)
    busy = runner.open_sequence()
    for number in range(22):  # long enough for cells to be moved
        runner.truncate(busy, 0)
        feed(runner, busy, token_ids[number : number + 30], "none")
    loaded = runner.load(runner.save(kept))

    assert np.array_equal(feed(runner, loaded, [5]), feed(runner, kept, [5]))
    runner.close()


def test_an_empty_sequence_is_not_saved(smollm: LlamaCppRunner) -> None:
    sequence = smollm.open_sequence()
    with pytest.raises(InvalidSpan):
        smollm.save(sequence)
    smollm.free_sequence(sequence)


def test_gemma_goes_on_beyond_its_window(gemma: LlamaCppRunner) -> None:
    """A sliding window's cells are saved as well: up to rounding the same logits, whole only."""
    token_ids = (gemma.tokenizer.encode(TEXT, False) * 5)[:700]
    sequence = holding(gemma, token_ids)
    loaded = gemma.load(gemma.save(sequence))
    rows = feed(gemma, loaded, token_ids[:1])

    assert np.abs(rows - feed(gemma, sequence, token_ids[:1])).max() < 2.5
    gemma.free_sequence(loaded)
    gemma.free_sequence(sequence)


def test_data_that_may_not_be_written_to_is_copied() -> None:
    """llama.cpp wants an array of C; data in memory of ours is lent to it as it is."""
    own = bytearray(HEAD_BYTES + 5)
    lent = state_array(memoryview(own), HEAD_BYTES)
    copied = state_array(memoryview(bytes(own)), HEAD_BYTES)
    own[HEAD_BYTES] = 7

    assert (len(lent), len(copied)) == (5, 5)
    assert (lent[0], copied[0]) == (7, 0)


def test_what_is_checked_grows_with_the_tokens() -> None:
    """Positions come before keys and values: 12 bytes for each, as llama.cpp writes them today."""
    assert num_checked_bytes(40) - num_checked_bytes(0) >= 12 * 40


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, open_runner: Open) -> Iterator[tuple[LlamaCppRunner, bytes]]:
    """A runner, and a sequence of 12 tokens that it saved, with checkpoints at 4 and 9."""
    runner = open_runner(write_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen35"), context=64, slots=2, threads=1)
    sequence = runner.open_sequence()
    for count in (4, 5, 3):
        feed(runner, sequence, list(range(5, 5 + count)), "none")
        if count != 3:
            runner.keep_checkpoint(sequence)
    yield runner, bytes(runner.save(sequence))
    runner.close()


@pytest.mark.parametrize("lengths", [(0, 9), (9, 4), (4, 4), (4, 13), (2**32 - 1, 9)], ids=str)
def test_wrong_lengths_of_checkpoints_are_refused(
    hybrid: tuple[LlamaCppRunner, bytes], lengths: tuple[int, int]
) -> None:
    runner, data = hybrid[0], bytearray(hybrid[1])
    first = HEAD_BYTES + 8  # after the numbers of images and of checkpoints
    num_bytes = int.from_bytes(data[first + 4 : first + 12], "little")
    for place, length, before in zip((first, first + 12 + num_bytes), lengths, (4, 9), strict=True):
        assert int.from_bytes(data[place : place + 4], "little") == before
        data[place : place + 4] = length.to_bytes(4, "little")
    write_head(memoryview(data), runner.state_format, 12)
    free_tokens = runner.free_tokens()
    with pytest.raises(StateRefused, match="lengths"):
        runner.load(memoryview(data))

    assert runner.free_tokens() == free_tokens


@pytest.mark.parametrize("num_bytes", [6, 2**31, 2**63, 2**64 - 1])
def test_a_wrong_size_of_a_checkpoint_is_refused(num_bytes: int) -> None:
    data = bytearray(pack_checkpoints([(4, state_array(memoryview(b"state"), 0))]))
    assert unpack_checkpoints(memoryview(data), 12)[1] == len(data)
    data[8:16] = num_bytes.to_bytes(8, "little")
    with pytest.raises(StateRefused, match="damaged"):
        unpack_checkpoints(memoryview(data), 12)
