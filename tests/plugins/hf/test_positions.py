"""The pool of positions against a model of it: sequences as plain lists of numbered tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from enginehouse.contract.backend import LastSampled, RunnerCapabilities, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StateRefused
from enginehouse_hf.cuda.positions import PositionPool

pytestmark = pytest.mark.hf

_CAPABILITIES = RunnerCapabilities(max_sequences=4, max_batch_tokens=16, max_context=12, cache_tokens=30)


class PoolMachine(RuleBasedStateMachine):
    """Every place holds the token that was last written there; a sequence must always read its own tokens."""

    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.pool = PositionPool(_CAPABILITIES, vocab_size=100)
        self.expected: dict[int, list[int]] = {}
        self.memory = np.full(_CAPABILITIES.cache_tokens, -1)
        self.next_token = 0

    @rule(target=sequences)
    def open(self) -> int | None:
        if len(self.expected) == _CAPABILITIES.max_sequences:
            with pytest.raises(CacheFull):
                self.pool.open()
            return -1
        sequence = self.pool.open()
        assert sequence not in self.expected
        self.expected[sequence] = []
        return sequence

    @rule(sequence=sequences, size=st.integers(1, 8))
    def append(self, sequence: int, size: int) -> None:
        if sequence not in self.expected:
            return
        start = len(self.expected[sequence])
        span = Span(sequence, start, np.arange(size, dtype=np.int32))
        used = len({place for s, tokens in self.expected.items() for place in self.pool.table[s, : len(tokens)]})
        if start + size > _CAPABILITIES.max_context or size > _CAPABILITIES.cache_tokens - used:
            with pytest.raises((CacheFull, InvalidSpan)):
                self.pool.check([span])
            return
        places = self.pool.append([span], self.pool.check([span]))
        self.memory[places] = range(self.next_token, self.next_token + size)
        self.expected[sequence] += range(self.next_token, self.next_token + size)
        self.next_token += size

    @rule(sequence=sequences, length=st.integers(0, 12))
    def truncate(self, sequence: int, length: int) -> None:
        if sequence in self.expected:
            kept = self.pool.truncate(sequence, length)
            del self.expected[sequence][length:]
            assert kept == len(self.expected[sequence])

    @rule(target=sequences, source=sequences, length=st.integers(0, 12))
    def fork(self, source: int, length: int) -> int:
        if source not in self.expected or len(self.expected) == _CAPABILITIES.max_sequences:
            return -1
        before = self.pool.free_tokens()
        sequence, kept = self.pool.fork(source, length)
        assert self.pool.free_tokens() == before
        self.expected[sequence] = self.expected[source][:length]
        assert kept == len(self.expected[sequence])
        return sequence

    @rule(target=sequences, size=st.integers(1, 13))
    def adopt(self, size: int) -> int:
        before = self.pool.free_tokens()
        if size > min(before, _CAPABILITIES.max_context) or len(self.expected) == _CAPABILITIES.max_sequences:
            with pytest.raises((CacheFull, StateRefused)):
                self.pool.adopt(size)
            assert self.pool.free_tokens() == before
            return -1
        sequence, places = self.pool.adopt(size)
        self.memory[places] = range(self.next_token, self.next_token + size)
        self.expected[sequence] = list(range(self.next_token, self.next_token + size))
        self.next_token += size
        return sequence

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        if sequence in self.expected:
            self.pool.free(sequence)
            del self.expected[sequence]

    @invariant()
    def sequences_read_their_own_tokens(self) -> None:
        used = set()
        for sequence, tokens in getattr(self, "expected", {}).items():
            places = self.pool.table[sequence, : len(tokens)]
            assert self.pool.length(sequence) == len(tokens)
            assert self.memory[places].tolist() == tokens
            used |= set(places.tolist())
        if hasattr(self, "pool"):
            assert self.pool.free_tokens() == _CAPABILITIES.cache_tokens - len(used)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_batches_of_single_and_many_tokens_agree() -> None:
    """The short way for one token each gives the places that the long way gives."""
    short, long = (PositionPool(_CAPABILITIES, 100) for _ in range(2))
    handles = [(short.open(), long.open()) for _ in range(3)]
    spans = [Span(a, 0, np.array([5], np.int32)) for a, _ in handles]
    together = short.append(spans, short.check(spans))
    run_in_daemon_thread = [long.append([span], long.check([span]))[0] for span in spans]

    assert together.tolist() == run_in_daemon_thread
    assert np.array_equal(short.table, long.table)


@pytest.mark.parametrize(
    "span",
    [
        Span(0, 1, LastSampled()),
        Span(0, 0, np.array([], np.int32)),
        Span(0, 0, np.array([1.0])),  # type: ignore[arg-type]
        Span(0, 0, np.array([100], np.int32)),
        Span(0, 0, np.array([3, -1], np.int32)),
        Span(0, 0, LastSampled(), num_layers=1),
        Span(1, 0, LastSampled()),
    ],
)
def test_broken_spans_are_refused(span: Span) -> None:
    pool = PositionPool(_CAPABILITIES, 100)
    pool.open()
    with pytest.raises(InvalidSpan):
        pool.check([span])
    assert pool.free_tokens() == 30
