"""Contract of refusals: a full cache, an invalid span, an abort. Nothing may change silently."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import attrs
import numpy as np
import pytest

from enginehouse.contract.backend import Outputs, Runner, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StepAborted
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver, repeated

__all__ = ["FailureContract"]

_ABORTING_S = 30.0
_SWITCH_INTERVAL_S = 1e-5
_MAX_PASSES = 2000

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
        _assert_refused(driver, [driver.span(good, prompts[0][-2:]), broken], f"a span that {breakage}")

        assert driver.runner.length(good) == len(prompts[0]) - 2
        assert driver.runner.length(bad) == 5
        assert driver.runner.free_tokens() == free_tokens
        self.assert_replays(driver, good, prompts[0])

    def test_invalid_span_when_a_sequence_comes_twice(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Only one span per sequence and pass is valid."""
        sequence = driver.holding(prompts[0][:4])
        span = driver.span(sequence, prompts[0][4:6])
        for second in (span, attrs.evolve(span, start=span.start + 2)):
            _assert_refused(driver, [span, second], "a batch with two spans of one sequence")

        assert driver.runner.length(sequence) == 4

    def test_invalid_span_when_the_sequence_was_freed(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A freed handle is unknown."""
        sequence = driver.open()
        span = driver.span(sequence, prompts[0])
        driver.free(sequence)
        _assert_refused(driver, [span], "a span of a sequence that was freed")

    def test_invalid_span_when_the_batch_is_too_large(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """The batch has one token more than ``max_batch_tokens``."""
        too_many = driver.runner.capabilities.max_batch_tokens + 1
        if too_many > driver.runner.free_tokens():
            pytest.skip("the cache is smaller than one batch: lower max_batch_tokens, or raise cache_tokens")
        sequence = driver.open()
        span = driver.span(sequence, repeated(prompts[0], too_many), "none")
        _assert_refused(driver, [span], f"a batch of {too_many} tokens, one more than max_batch_tokens,")

        assert driver.runner.length(sequence) == 0

    def test_invalid_span_when_the_context_is_exceeded(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A sequence holds at most ``max_context`` tokens."""
        max_context = driver.runner.capabilities.max_context
        if max_context > self.max_fill_tokens:
            pytest.skip(f"the context is longer than max_fill_tokens, {self.max_fill_tokens}: open with a shorter one")
        if max_context + 1 > driver.runner.free_tokens():
            pytest.skip("the cache holds no more than one whole context: open with more cache_tokens or less context")
        sequence = driver.holding(repeated(prompts[0], max_context))
        _assert_refused(driver, [driver.span(sequence, prompts[0][:1])], f"token {max_context + 1} of a sequence")

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
            pytest.skip(
                f"the cache is larger than max_fill_tokens, {self.max_fill_tokens}: open with fewer cache_tokens"
            )
        if capabilities.cache_tokens >= capabilities.max_sequences * capabilities.max_context:
            pytest.skip(
                "the cache holds every sequence at its longest, so it is never full: open with fewer cache_tokens than "
                "max_sequences * max_context"
            )
        sequence = driver.open()
        for _ in range(capabilities.cache_tokens):
            if (free_tokens := driver.runner.free_tokens()) <= 8:
                return sequence
            if driver.runner.length(sequence) + 16 >= capabilities.max_context:
                sequence = driver.open()
            room = capabilities.max_context - 16 - driver.runner.length(sequence)
            num_tokens = min(free_tokens - 4, room, capabilities.max_batch_tokens)
            driver.feed(sequence, repeated(token_ids, num_tokens), "none")
            assert driver.runner.free_tokens() < free_tokens, f"free_tokens() is as before after {num_tokens} tokens"
        raise AssertionError(f"{capabilities.cache_tokens} passes (cache_tokens) have not filled the cache")

    @pytest.fixture(scope="class")
    @classmethod
    def abortable(cls, form: str, make_runner: Callable[[], Runner]) -> Iterator[Runner]:
        """A runner of its own, as one that does not forget an ``abort`` fails in every test after it."""
        runner = make_runner()
        yield runner
        runner.close()

    @pytest.fixture
    def aborting(self, abortable: Runner) -> Iterator[RunnerDriver]:
        """Drives that runner."""
        driver = RunnerDriver(abortable)
        yield driver
        driver.free_all()

    def test_abort_without_a_pass_does_no_harm(self, aborting: RunnerDriver, prompts: list[list[int]]) -> None:
        """At most the next pass is aborted; a retry works."""
        aborting.runner.abort()
        sequence = aborting.open()
        with contextlib.suppress(StepAborted):
            aborting.runner.forward([aborting.span(sequence, prompts[0][:-1], "none")])
        aborting.runner.truncate(sequence, 0)
        try:
            self.assert_replays(aborting, sequence, prompts[0])
        except StepAborted:
            pytest.fail(
                "one call of abort() ended two passes: forward must clear the flag when it raises", pytrace=False
            )

    def test_abort_interrupts_passes(self, aborting: RunnerDriver, prompts: list[list[int]]) -> None:
        """With ``capabilities.abort``: one of many passes ends, if another thread calls ``abort`` all the time."""
        if not aborting.runner.capabilities.abort:
            pytest.skip("optional: abort() has no effect, and capabilities.abort is False")
        token_ids = repeated(prompts[0], self._longest_pass(aborting))
        deadline, num_passes = time.monotonic() + _ABORTING_S, 0
        with _calls_of_abort(aborting):
            while time.monotonic() < deadline and num_passes < _MAX_PASSES:
                sequence, num_passes = aborting.open(), num_passes + 1
                is_aborted = self._is_aborted(aborting, {sequence: token_ids})
                aborting.free(sequence)
                if is_aborted:
                    return
        promise = "capabilities.abort is True, but abort() from another thread interrupted none of"
        advice = "forward must look for it between layers, and raise StepAborted"
        pytest.fail(f"{promise} {num_passes} passes of {len(token_ids)} tokens: {advice}", pytrace=False)

    def test_abort_leaves_honest_lengths(self, aborting: RunnerDriver, prompts: list[list[int]]) -> None:
        """An aborted pass reports the current lengths of its sequences, and they continue from there."""
        long = repeated(prompts[0], self._longest_pass(aborting) - len(prompts[1]))
        texts = long, prompts[1]
        sequences = [aborting.holding(token_ids[:3]) for token_ids in texts]
        rest = [token_ids[3:] for token_ids in texts]
        with _calls_of_abort(aborting):
            is_aborted = self._is_aborted(aborting, dict(zip(sequences, rest, strict=True)))

        for sequence, token_ids in zip(sequences, texts, strict=True):
            assert is_aborted or aborting.runner.length(sequence) == len(token_ids)
            aborting.runner.truncate(sequence, len(token_ids) - 2)
            self.assert_replays(aborting, sequence, token_ids, "a sequence after an aborted pass")

    @staticmethod
    def _longest_pass(driver: RunnerDriver) -> int:
        """Return the number of tokens of a long pass that leaves room for a second sequence of the same length."""
        capabilities = driver.runner.capabilities
        return min(capabilities.max_batch_tokens, capabilities.max_context, driver.runner.free_tokens() // 3)

    @staticmethod
    def _is_aborted(driver: RunnerDriver, batch: dict[int, list[int]]) -> bool:
        """Run a pass; return True if it was aborted, after checking the lengths that the error reports."""
        try:
            driver.runner.forward([driver.span(sequence, token_ids) for sequence, token_ids in batch.items()])
        except StepAborted as error:
            lengths = {sequence: driver.runner.length(sequence) for sequence in batch}
            assert error.lengths == lengths, f"StepAborted.lengths is {error.lengths}, but length() gives {lengths}"
            return True
        return False


@contextlib.contextmanager
def _calls_of_abort(driver: RunnerDriver) -> Iterator[None]:
    """Call ``abort`` all the time on another thread, while the block runs.

    Threads take turns more often than usual, so that calls fall into short passes that hold Python's lock as well.
    """
    done, interval_s = threading.Event(), sys.getswitchinterval()

    def keep_aborting() -> None:
        while not done.is_set():
            driver.runner.abort()
            done.wait(0.0002)

    thread = threading.Thread(target=keep_aborting)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval_s)
        with contextlib.suppress(StepAborted):  # the last call may have come after the last pass
            driver.alone([0])


def _assert_refused(driver: RunnerDriver, spans: list[Span], what: str) -> None:
    """Assert that a pass with these spans raises InvalidSpan."""
    try:
        driver.runner.forward(spans)
    except InvalidSpan:
        return
    except Exception as error:  # noqa: BLE001 - a runner may raise any exception
        found = f"raised {type(error).__name__}: {error}"
    else:
        found = "was run"
    pytest.fail(f"{what} {found}; forward must raise InvalidSpan before it changes anything (see SlotTable.check)")
