"""Contract of refusals: a full cache, an invalid span, an abort. Nothing may change silently."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import cast

import attrs
import numpy as np
import pytest

from enginehouse.contract.backend import Outputs, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StepAborted
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver, repeated

__all__ = ["FailureContract"]

_Breakage = Callable[[Span, RunnerDriver], Span]

_BROKEN_SPANS: dict[str, _Breakage] = {
    "starts too early": lambda span, _: attrs.evolve(span, start=span.start - 1),
    "starts too late": lambda span, _: attrs.evolve(span, start=span.start + 1),
    "is empty": lambda span, _: attrs.evolve(span, input=np.empty(0, np.int32)),
    "has a negative id": lambda span, _: attrs.evolve(span, input=np.array([1, -1], np.int32)),
    "has an id beyond the vocabulary": lambda span, driver: attrs.evolve(
        span, input=np.array([1, driver.runner.tokenizer.vocab_size], np.int32)
    ),
    "has an unknown handle": lambda span, _: attrs.evolve(span, sequence=987_654),
    "has a negative handle": lambda span, _: attrs.evolve(span, sequence=-1),
    "asks for layers that cannot be chosen": lambda span, _: attrs.evolve(span, num_layers=987),
    "has unknown outputs": lambda span, _: attrs.evolve(span, outputs=cast(Outputs, "some")),
}


class FailureContract(ContractBase):
    """A runner refuses before it changes anything."""

    @pytest.mark.parametrize("breakage", _BROKEN_SPANS)
    def test_invalid_span_changes_nothing(self, driver: RunnerDriver, prompts: list[list[int]], breakage: str) -> None:
        """InvalidSpan is raised even if valid spans precede the invalid one in the batch."""
        good, bad = driver.holding(prompts[0][:-2]), driver.holding(prompts[1][:5])
        free_tokens = driver.runner.free_tokens()
        broken = _BROKEN_SPANS[breakage](driver.span(bad, prompts[1][5:7]), driver)
        with pytest.raises(InvalidSpan):
            driver.runner.forward([driver.span(good, prompts[0][-2:]), broken])

        assert driver.runner.length(good) == len(prompts[0]) - 2
        assert driver.runner.length(bad) == 5
        assert driver.runner.free_tokens() == free_tokens
        self.assert_replays(driver, good, prompts[0])

    def test_invalid_span_when_a_sequence_comes_twice(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Only one span per sequence and pass is valid."""
        sequence = driver.holding(prompts[0][:4])
        span = driver.span(sequence, prompts[0][4:6])
        for second in (span, attrs.evolve(span, start=span.start + 2)):
            with pytest.raises(InvalidSpan):
                driver.runner.forward([span, second])

        assert driver.runner.length(sequence) == 4

    def test_invalid_span_when_the_sequence_was_freed(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A freed handle is unknown."""
        sequence = driver.open()
        span = driver.span(sequence, prompts[0])
        driver.free(sequence)
        with pytest.raises(InvalidSpan):
            driver.runner.forward([span])

    def test_invalid_span_when_the_batch_is_too_large(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """The batch has one token more than ``max_batch_tokens``."""
        too_many = driver.runner.capabilities.max_batch_tokens + 1
        if too_many > driver.runner.free_tokens():
            pytest.skip("the cache is smaller than one batch")
        sequence = driver.open()
        with pytest.raises(InvalidSpan):
            driver.runner.forward([driver.span(sequence, repeated(prompts[0], too_many), "none")])

        assert driver.runner.length(sequence) == 0

    def test_invalid_span_when_the_context_is_exceeded(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A sequence holds at most ``max_context`` tokens."""
        max_context = driver.runner.capabilities.max_context
        if max_context > self.max_fill_tokens:
            pytest.skip(f"the context is longer than {self.max_fill_tokens} tokens")
        if max_context + 1 > driver.runner.free_tokens():
            pytest.skip("the cache holds no more than one whole context")
        sequence = driver.holding(repeated(prompts[0], max_context))
        with pytest.raises(InvalidSpan):
            driver.runner.forward([driver.span(sequence, prompts[0][:1])])

        assert driver.runner.length(sequence) == max_context

    def test_cache_full_changes_nothing(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """``free_tokens`` positions fit; a batch with one more is refused as a whole, and fits after a free."""
        first = driver.holding(prompts[0][:-2])
        sequence = self._leave_few(driver, prompts[1])
        free_tokens = driver.runner.free_tokens()
        lengths = driver.runner.length(first), driver.runner.length(sequence)
        too_many = repeated(prompts[2], free_tokens - 1)
        with pytest.raises(CacheFull) as caught:
            driver.runner.forward([driver.span(first, prompts[0][-2:]), driver.span(sequence, too_many, "none")])

        assert caught.value.needed > caught.value.free
        assert (driver.runner.length(first), driver.runner.length(sequence)) == lengths
        assert driver.runner.free_tokens() == free_tokens
        driver.feed(sequence, repeated(prompts[2], free_tokens), "none")
        driver.free(sequence)
        self.assert_replays(driver, first, prompts[0])

    def _leave_few(self, driver: RunnerDriver, token_ids: list[int]) -> int:
        """Fill the cache until 3 to 8 positions are free; return the sequence that can take them."""
        capabilities = driver.runner.capabilities
        if capabilities.cache_tokens > self.max_fill_tokens:
            pytest.skip(f"the cache is larger than {self.max_fill_tokens} tokens")
        if capabilities.cache_tokens >= capabilities.max_sequences * capabilities.max_context:
            pytest.skip("the cache holds every sequence at its longest: it is never full")
        sequence = driver.open()
        while driver.runner.free_tokens() > 8:
            if driver.runner.length(sequence) + 16 >= capabilities.max_context:
                sequence = driver.open()
            room = capabilities.max_context - 16 - driver.runner.length(sequence)
            num_tokens = min(driver.runner.free_tokens() - 4, room, capabilities.max_batch_tokens)
            driver.feed(sequence, repeated(token_ids, num_tokens), "none")
        return sequence

    def test_abort_leaves_honest_lengths(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """An aborted pass reports the current lengths of its sequences, and they continue from there."""
        capabilities = driver.runner.capabilities
        largest = min(capabilities.max_batch_tokens, capabilities.max_context, driver.runner.free_tokens() // 3)
        long, short = repeated(prompts[0], largest - len(prompts[1])), prompts[1]
        started = time.perf_counter()
        driver.alone(long)
        usual_s = time.perf_counter() - started
        sequences = driver.holding(long[:3]), driver.holding(short[:3])
        aborted = self._forward_and_abort(driver, dict(zip(sequences, (long[3:], short[3:]), strict=True)))

        if capabilities.abort and usual_s > 0.2:
            assert aborted, f"abort() did not interrupt a forward pass that takes {usual_s:.2f} s"
        for sequence, token_ids in zip(sequences, (long, short), strict=True):
            assert aborted or driver.runner.length(sequence) == len(token_ids)
            driver.runner.truncate(sequence, len(token_ids) - 2)
            self.assert_replays(driver, sequence, token_ids)

    @staticmethod
    def _forward_and_abort(driver: RunnerDriver, batch: dict[int, list[int]]) -> bool:
        """Run a pass while another thread calls ``abort`` repeatedly; return True if it was aborted."""
        done = threading.Event()

        def keep_aborting() -> None:
            while not done.wait(0.005):
                driver.runner.abort()

        thread = threading.Thread(target=keep_aborting)
        thread.start()
        try:
            driver.runner.forward([driver.span(sequence, token_ids) for sequence, token_ids in batch.items()])
        except StepAborted as error:
            assert error.lengths == {sequence: driver.runner.length(sequence) for sequence in batch}
            return True
        finally:
            done.set()
            thread.join()
        return False

    def test_abort_without_a_pass_does_no_harm(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """At most the next pass is aborted; a retry works."""
        driver.runner.abort()
        sequence = driver.open()
        with contextlib.suppress(StepAborted):
            driver.runner.forward([driver.span(sequence, prompts[0][:-1], "none")])

        self.assert_replays(driver, sequence, prompts[0])
