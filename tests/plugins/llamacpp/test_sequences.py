"""Moving and parking sequences changes no bit of what they compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import CacheFull, RunnerError
from enginehouse_llamacpp import sequences
from enginehouse_llamacpp.compaction import Compactor
from enginehouse_llamacpp.memory import SequenceMemory
from enginehouse_llamacpp.runner import LlamaCppRunner

from .hybrid_models import write_hybrid

pytestmark = pytest.mark.llamacpp

Open = Callable[..., LlamaCppRunner]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, smollm_path: Path, open_runner: Open) -> Iterator[LlamaCppRunner]:
    """A runner that moves and parks all the time."""
    monkeypatch.setattr(sequences, "_MIN_GROWTH_CELLS", 64)
    monkeypatch.setattr(sequences, "_IDLE_PASSES", 2)
    monkeypatch.setattr(sequences, "_MIN_PARKED_TOKENS", 8)
    runner = open_runner(
        smollm_path, context=160, cache_tokens=384, slots=4, max_sequences=10, n_batch=64, n_ubatch=32, threads=1
    )
    yield runner
    runner.close()


class Walk:
    """Random operations on a runner; knows the token ids that each sequence must hold."""

    def __init__(self, runner: LlamaCppRunner, seed: int) -> None:
        self.runner, self.random = runner, random.Random(seed)
        self.held: dict[int, list[int]] = {}

    def pick(self) -> int:
        return self.random.choice(list(self.held))

    def append(self) -> tuple[int, np.ndarray]:
        """Tokens for one to four sequences; one of them and its row."""
        chosen = self.random.sample(list(self.held), min(len(self.held), self.random.randint(1, 4)))
        spans = []
        for sequence in chosen:
            count = min(self.random.choice([1, 1, 1, 5, 15]), 159 - len(self.held[sequence]))
            if count > 0:
                token_ids = np.array([self.random.randrange(49_152) for _ in range(count)], np.int32)
                spans.append(Span(sequence, self.runner.length(sequence), token_ids))
        if not spans:
            return -1, np.empty(0)
        rows = self.runner.forward(spans).host().copy()
        for span in spans:
            assert isinstance(span.input, np.ndarray)
            self.held[span.sequence] += span.input.tolist()
        at = self.random.randrange(len(spans))
        return spans[at].sequence, rows[at]

    def change(self) -> None:
        """Open, fork, truncate or free."""
        action = self.random.random()
        if len(self.held) < 2 or (action < 0.5 and len(self.held) < 10):
            if self.held and action < 0.3:
                source = self.pick()
                length = self.random.randint(0, len(self.held[source]))
                copy, shared = self.runner.fork(source, length)
                assert shared == length
                self.held[copy] = self.held[source][:length]
            else:
                self.held[self.runner.open_sequence()] = []
        elif action < 0.75:
            sequence = self.pick()
            length = self.random.randint(0, len(self.held[sequence]))
            assert self.runner.truncate(sequence, length) == length
            del self.held[sequence][length:]
        else:
            self.free(self.pick())

    def free(self, sequence: int) -> None:
        self.runner.free_sequence(sequence)
        del self.held[sequence]


def test_rows_survive_moving_and_parking(
    busy: LlamaCppRunner, smollm: LlamaCppRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random walk, compared to the last bit with a runner that does nothing else."""
    num_moves = 0
    run = Compactor.run

    def counted(compactor: Compactor, open_sequences: dict[int, object]) -> None:
        nonlocal num_moves
        num_moves += 1
        run(compactor, open_sequences)  # type: ignore[arg-type]

    monkeypatch.setattr(Compactor, "run", counted)
    walk, num_swapped_out = Walk(busy, seed=7), 0
    for step in range(160):
        if not walk.held or walk.random.random() < 0.45:
            walk.change()
            continue
        try:
            sequence, row = walk.append()
        except CacheFull:
            walk.free(walk.pick())
            continue
        if step % 8 == 0 and sequence >= 0:
            alone = smollm.open_sequence()
            expected = smollm.forward([Span(alone, 0, np.array(walk.held[sequence], np.int32))]).host()[0]
            smollm.free_sequence(alone)
            assert np.array_equal(row, expected), step
        for handle, token_ids in walk.held.items():
            held = busy.sequences.held(handle)
            num_swapped_out += held.swapped_out is not None
            assert busy.length(handle) == len(token_ids)
            assert np.all(np.diff(held.cells) > 0)

    assert num_moves > 5
    assert num_swapped_out > 10
    for handle in list(walk.held):
        walk.free(handle)
    assert busy.free_tokens() == busy.capabilities.cache_tokens


def test_parked_tokens_count_and_come_back(busy: LlamaCppRunner) -> None:
    """Idle tokens leave the cells when others need room; length and free positions stay as they were."""
    idle, active = busy.open_sequence(), busy.open_sequence()
    busy.forward([Span(idle, 0, np.arange(100, 160, dtype=np.int32), "none")])
    for start in range(0, 120, 8):
        busy.forward([Span(active, start, np.arange(start, start + 8, dtype=np.int32), "none")])
    swapped_out = busy.sequences.held(idle).swapped_out

    assert swapped_out is not None
    assert (swapped_out.num_tokens, busy.length(idle)) == (60, 60)
    assert busy.free_tokens() == busy.capabilities.cache_tokens - 180
    copy, shared = busy.fork(idle, 50)
    assert (shared, busy.length(copy), busy.length(idle)) == (50, 50, 60)
    assert busy.sequences.held(idle).swapped_out is None
    for handle in (idle, active, copy):
        busy.free_sequence(handle)
    assert busy.free_tokens() == busy.capabilities.cache_tokens


def test_a_fork_that_fails_leaves_nothing(tmp_path: Path, open_runner: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a handle nor cells, when llama.cpp cannot restore the checkpoint."""
    runner = open_runner(write_hybrid(tmp_path, "qwen35"), context=64, slots=1, max_sequences=2, threads=1)
    source = runner.open_sequence()
    for start in (0, 8):
        runner.forward([Span(source, start, np.arange(5, 13, dtype=np.int32), "none")])
        runner.keep_checkpoint(source)
    free_tokens = runner.free_tokens()

    def fail(*_: object) -> None:
        raise RunnerError("llama.cpp could not restore the state of a sequence")

    with monkeypatch.context() as patch:
        patch.setattr(SequenceMemory, "restore_state", fail)
        with pytest.raises(RunnerError, match="could not restore"):
            runner.fork(source, 8)
    copy, shared = runner.fork(source, 8)

    assert (shared, runner.length(copy), runner.length(source)) == (8, 8, 16)
    for handle in (source, copy):
        runner.free_sequence(handle)
    assert runner.free_tokens() == free_tokens + 16
    runner.close()
