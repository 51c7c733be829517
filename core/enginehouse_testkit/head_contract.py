"""Contract suite for runners that draft with a draft head of their model, as a test class.

::

    class TestHead(HeadContract):
        @pytest.fixture
        def open_headed(self):
            return my_function  # opens a runner of a small random model that has a head

The drafts of a sequence depend on its tokens only: a fork, a truncated or saved sequence, one that was computed in
chunks or beside others is drafted for as if it had been computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Runner, Span, StateKeeper
from enginehouse.contract.drafter import NUM_GRADES, BoundDrafter, Draft, DraftTask, HeadKeeper
from enginehouse_testkit.contract.driver import largest_difference

__all__ = ["HeadContract"]

_NUM_TOKENS = 5


class HeadContract:
    """Tests every guarantee of `HeadKeeper`.

    Attributes:
        max_logit_difference: between rows of runners with and without a head.
        num_token_ids: token ids below this one are used.
    """

    max_logit_difference: ClassVar[float] = 1e-4
    num_token_ids: ClassVar[int] = 90

    @pytest.fixture
    def head_source(self) -> ModelSource | None:
        """The files of the head; None if the model's own hold it."""
        return None

    @pytest.fixture
    def token_ids(self) -> NDArray[np.int32]:
        """Forty tokens."""
        return (np.arange(40, dtype=np.int32) * 31 + 5) % self.num_token_ids

    @pytest.fixture
    def runner(self, open_headed: Callable[[], Runner]) -> Iterator[Runner]:
        """A runner that is closed after the test."""
        runner = open_headed()
        yield runner
        runner.close()

    @pytest.fixture
    def head(self, runner: Runner, head_source: ModelSource | None) -> Iterator[BoundDrafter]:
        """Its head, which drafts regardless of its confidence."""
        assert isinstance(runner, HeadKeeper)
        head = runner.open_head(head_source, max_tokens=_NUM_TOKENS, min_probability=0.0)
        yield head
        head.shutdown()

    @pytest.fixture
    def expected(self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32]) -> list[int]:
        """The draft after all tokens but the last were computed at once."""
        sequence = runner.open_sequence()
        _append(runner, sequence, token_ids[:-1])
        (draft,) = self.drafts(head, [(sequence, token_ids)])
        runner.free_sequence(sequence)
        return draft

    def drafts(
        self, head: BoundDrafter, texts: Sequence[tuple[int, NDArray[np.int32]]], max_tokens: int = _NUM_TOKENS
    ) -> list[list[int]]:
        """Return the drafts for sequences, each with its text, after the head has read them."""
        session = head.open(np.zeros(1, np.int32), ())
        found: list[Draft | None] = []
        for _ in range(40):
            found = list(head.propose([DraftTask(session, text, sequence, max_tokens) for sequence, text in texts]))
            if None not in found:
                break
        head.close(session)
        return [list(draft.token_ids) if draft is not None else [] for draft in found]

    def test_a_draft_has_tokens_of_the_vocabulary(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """Drafts are as long as requested, and graded; a shorter one begins the same."""
        sequence = runner.open_sequence()
        _append(runner, sequence, token_ids[:-1])
        (draft,) = head.propose([DraftTask(head.open(token_ids, ()), token_ids, sequence, 2)])

        assert len(expected) == _NUM_TOKENS
        assert all(0 <= token_id < runner.tokenizer.vocab_size for token_id in expected)
        assert draft is not None and 0 <= draft.grade < NUM_GRADES
        assert list(draft.token_ids) == expected[:2]

    def test_drafts_do_not_depend_on_chunks(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """Nor on drafts at earlier ends of the text, or on verified and rejected ones."""
        chunked, single = runner.open_sequence(), runner.open_sequence()
        for part in np.split(token_ids[:-1], [9, 10, 31]):
            _append(runner, chunked, part)
        _append(runner, single, token_ids[:20])
        for end in range(20, len(token_ids) - 1):
            (draft,) = self.drafts(head, [(single, token_ids[: end + 1])])
            _append(runner, single, np.array([token_ids[end], *draft], np.int32))
            runner.truncate(single, end + 1)

        assert self.drafts(head, [(chunked, token_ids), (single, token_ids)]) == [expected, expected]

    def test_drafts_do_not_depend_on_other_sequences(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """A batch of texts of several lengths gives what each gives alone, in passes that they share."""
        texts = [token_ids[:end] for end in (7, 40, 23)]
        sequences = [runner.open_sequence() for _ in texts]
        runner.forward([Span(one, 0, text[:6]) for one, text in zip(sequences, texts, strict=True)])
        longer = [(one, text[6:-1]) for one, text in zip(sequences, texts, strict=True) if len(text) > 7]
        runner.forward([Span(one, 6, part) for one, part in longer])
        together = self.drafts(head, list(zip(sequences, texts, strict=True)))
        alone = []
        for text in texts:
            sequence = runner.open_sequence()
            _append(runner, sequence, text[:-1])
            alone += self.drafts(head, [(sequence, text)])
            runner.free_sequence(sequence)

        assert together == alone
        assert together[1] == expected

    def test_a_truncated_sequence_is_drafted_for_like_a_new_one(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """Whatever the head had read of what was dropped."""
        sequence = runner.open_sequence()
        other = token_ids[::-1].copy()
        _append(runner, sequence, np.concatenate([token_ids[:15], other[:20]]))
        self.drafts(head, [(sequence, np.concatenate([token_ids[:15], other[:21]]))])
        kept = runner.truncate(sequence, 15)
        assert kept == 15 or runner.capabilities.truncate == "checkpoint"
        _append(runner, sequence, token_ids[kept:-1])

        assert self.drafts(head, [(sequence, token_ids)]) == [expected]

    def test_rejected_drafts_are_dropped_one_by_one(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """Also by a runner that goes back to checkpoints otherwise: logits and drafts are those of the shorter text."""
        source, begin = runner.open_sequence(), len(token_ids) - 2 - _NUM_TOKENS
        _append(runner, source, token_ids[:begin])
        rows = {}
        for num_right in range(_NUM_TOKENS + 1):
            sequence, _ = runner.fork(source, begin)
            verified = token_ids[begin : begin + 1 + _NUM_TOKENS].copy()
            verified[1 + num_right :] = (verified[1 + num_right :] + 1) % self.num_token_ids
            _append(runner, sequence, verified)
            assert runner.truncate(sequence, begin + 1 + num_right) == begin + 1 + num_right
            _append(runner, sequence, token_ids[begin + 1 + num_right : -1])

            assert self.drafts(head, [(sequence, token_ids)]) == [expected]
            rows[num_right] = _append(runner, sequence, token_ids[-1:])
            runner.free_sequence(sequence)
        assert max(largest_difference(row, rows[0]) for row in rows.values()) <= self.max_logit_difference

    def test_the_last_token_may_be_another_than_before(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """The runner does not hold it yet."""
        sequence = runner.open_sequence()
        _append(runner, sequence, token_ids[:-1])
        self.drafts(head, [(sequence, np.append(token_ids[:-1], token_ids[:1]))])

        assert self.drafts(head, [(sequence, token_ids)]) == [expected]

    def test_forks_are_drafted_for_like_new_sequences(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """Of a sequence that the head had read, or not, and of a part of it; the source is not changed."""
        for has_read in (False, True):
            source = runner.open_sequence()
            _append(runner, source, token_ids[:-1])
            if has_read:
                self.drafts(head, [(source, token_ids)])
            for length in (len(token_ids) - 1, 17, 1):
                fork, kept = runner.fork(source, length)
                _append(runner, fork, token_ids[kept:-1])

                assert self.drafts(head, [(fork, token_ids)]) == [expected]
                runner.free_sequence(fork)
            assert self.drafts(head, [(source, token_ids)]) == [expected]
            runner.free_sequence(source)

    def test_saved_sequences_are_drafted_for_like_new_ones(
        self, runner: Runner, head: BoundDrafter, token_ids: NDArray[np.int32], expected: list[int]
    ) -> None:
        """The format of the states names the head."""
        if not isinstance(runner, StateKeeper) or not runner.capabilities.states:
            pytest.skip("optional: the runner saves no sequences (capabilities.states)")
        sequence = runner.open_sequence()
        _append(runner, sequence, token_ids[:-1])
        data = bytearray(runner.save(sequence))
        runner.free_sequence(sequence)
        loaded = runner.load(memoryview(data))

        assert self.drafts(head, [(loaded, token_ids)]) == [expected]

    def test_a_head_changes_nothing_else(
        self,
        runner: Runner,
        head: BoundDrafter,
        open_headed: Callable[[], Runner],
        token_ids: NDArray[np.int32],
        expected: list[int],
    ) -> None:
        """Lengths, free positions and rows are those of a runner without a head."""
        plain = open_headed()
        rows = []
        for one in (plain, runner):
            sequence = one.open_sequence()
            found = _append(one, sequence, token_ids[:-1])
            free = one.free_tokens()
            if one is runner:
                assert self.drafts(head, [(sequence, token_ids)]) == [expected]
            assert (one.length(sequence), one.free_tokens()) == (len(token_ids) - 1, free)
            rows.append(np.concatenate([found, _append(one, sequence, token_ids[-1:])]))
        plain.close()

        assert largest_difference(*rows) <= self.max_logit_difference

    def test_an_unlikely_token_ends_a_draft(
        self, open_headed: Callable[[], Runner], head_source: ModelSource | None, token_ids: NDArray[np.int32]
    ) -> None:
        """No token of a random model is certain."""
        runner = open_headed()
        assert isinstance(runner, HeadKeeper)
        head = runner.open_head(head_source, max_tokens=_NUM_TOKENS, min_probability=1.0)
        sequence = runner.open_sequence()
        _append(runner, sequence, token_ids[:-1])

        assert self.drafts(head, [(sequence, token_ids)]) == [[]]
        runner.close()


def _append(runner: Runner, sequence: int, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Append tokens to a sequence, if any, and return their rows."""
    if not len(token_ids):
        return np.empty((0, runner.tokenizer.vocab_size), np.float32)
    return runner.forward([Span(sequence, runner.length(sequence), token_ids, "all")]).host().copy()
