"""Contract of checkpoints: truncations and forks go back to a kept state, after any order of operations."""

from __future__ import annotations

import random

import pytest

from enginehouse.contract.backend import Runner, StateKeeper
from enginehouse.contract.checkpoints import NUM_SAVED_CHECKPOINTS, CheckpointKeeper
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver, repeated

__all__ = ["CheckpointContract"]


class CheckpointContract(ContractBase):
    """A sequence with a state that cannot be cut goes back to where a copy of it was kept."""

    @pytest.fixture
    def keeper(self, runner: Runner) -> CheckpointKeeper:
        """The runner, if it keeps checkpoints."""
        if runner.capabilities.truncate != "checkpoint":
            pytest.skip("optional: the runner keeps no checkpoints (capabilities.truncate)")
        assert isinstance(runner, CheckpointKeeper), "truncate='checkpoint' needs keep_checkpoint and kept_length"
        return runner

    @pytest.mark.parametrize(("wanted", "kept"), [(12, 12), (11, 9), (9, 9), (8, 4), (4, 4)])
    def test_a_truncation_goes_back_to_the_last_checkpoint(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]], wanted: int, kept: int
    ) -> None:
        """At least that is kept, as planned; other tokens may follow, and the same can be done again."""
        sequence = self._holding(keeper, driver, prompts[0][:12], (4, 9))
        planned = keeper.kept_length(sequence, wanted)

        assert kept <= planned <= wanted
        assert planned == keeper.truncate(sequence, wanted) == keeper.length(sequence)
        what = f"a sequence of 12 tokens truncated to {planned}, continued with others"
        self.assert_replays(driver, sequence, prompts[0][:planned] + prompts[1][:5], what)
        again = keeper.truncate(sequence, planned)
        assert min(kept, 9) <= again <= planned
        self.assert_replays(driver, sequence, prompts[0][:again] + prompts[2][:5], f"{what}, and once more")

    def test_a_truncation_drops_later_checkpoints(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A state is never that of tokens which have been replaced."""
        sequence = self._holding(keeper, driver, prompts[0][:12], (4, 8, 12))
        assert keeper.truncate(sequence, 5) >= 4
        keeper.truncate(sequence, 4)
        driver.feed(sequence, prompts[1][:8], "none")  # as long as before
        kept = keeper.truncate(sequence, 11)
        what = "a sequence that went back to a checkpoint twice: was a later checkpoint of other tokens used?"
        self.assert_replays(driver, sequence, (prompts[0][:4] + prompts[1][:8])[:kept] + prompts[2][:4], what)

    def test_an_empty_sequence_goes_back_to_nothing(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A checkpoint of nothing is not kept, one at the same length only once, and none outlives its sequence."""
        sequence = driver.open()
        keeper.keep_checkpoint(sequence)
        driver.feed(sequence, prompts[0][:6], "none")
        keeper.keep_checkpoint(sequence)
        keeper.keep_checkpoint(sequence)
        assert keeper.truncate(sequence, 0) == 0
        self.assert_replays(driver, sequence, prompts[1])
        driver.free(sequence)

        other = driver.open()  # probably with the same handle
        driver.feed(other, prompts[2][:12], "none")
        kept = keeper.truncate(other, 8)
        what = "a new sequence, truncated: had it a checkpoint of a freed one?"
        self.assert_replays(driver, other, prompts[2][:kept] + prompts[1][:4], what)

    def test_a_fork_shares_checkpoints(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A fork starts at one, has those before it, and keeps them when its source is changed or freed."""
        prompt = prompts[0]
        if keeper.capabilities.fork == "none":
            pytest.skip("optional: the runner does not fork sequences (capabilities.fork)")
        source = self._holding(keeper, driver, prompt[:14], (4, 9))
        planned = keeper.kept_length(source, 12)
        fork, shared = driver.fork(source, 12)
        whole, length = driver.fork(source, 14)

        assert 9 <= shared == planned <= 12
        assert length == 14
        self.assert_replays(driver, fork, prompt[:shared] + prompts[1][:4])
        self.assert_replays(driver, source, prompt[:14] + prompts[2][:4])
        assert keeper.truncate(source, 5) >= 4
        driver.free(source)
        driver.holding(prompts[1])  # takes what was freed
        for sequence in (fork, whole):
            kept = keeper.truncate(sequence, 9)
            assert kept == 9
            self.assert_replays(driver, sequence, prompt[:9] + prompts[2][:4], "a fork that went back to a checkpoint")
            kept = keeper.truncate(sequence, 6)
            assert 4 <= kept <= 6
            self.assert_replays(driver, sequence, prompt[:kept] + prompts[1][:4], "a fork that went back twice")

    def test_a_rejected_draft_is_gone(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A checkpoint before a span undoes the whole span, also beside other sequences of the pass."""
        prompt = prompts[0]
        drafted, other = driver.holding(prompt[:10]), driver.holding(prompts[1][:6])
        keeper.keep_checkpoint(drafted)
        rows = driver.forward(driver.span(drafted, prompts[2][:4], "all"), driver.span(other, prompts[1][6:9], "all"))
        expected = driver.alone(prompts[1][:9])[6:]
        self.assert_same(rows[4:], expected, keeper.capabilities)

        assert keeper.truncate(drafted, 10) == 10
        self.assert_replays(driver, drafted, prompt, "a sequence after a draft that was taken back")
        self.assert_replays(driver, other, prompts[1], "the sequence beside it")

    def test_checkpoints_are_limited(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """One after each token of all sequences: none fails or takes positions, and those that are left are right."""
        token_ids = repeated(prompts[0], 24)
        sequences = [driver.open() for _ in range(3)]
        for token_id in token_ids:
            for sequence in sequences:
                driver.feed(sequence, [token_id], "none")
                free_tokens = keeper.free_tokens()
                keeper.keep_checkpoint(sequence)
                assert keeper.free_tokens() == free_tokens
        for sequence in sequences:
            kept = keeper.truncate(sequence, 20)
            self.assert_replays(driver, sequence, token_ids[:kept] + prompts[1][:4])

    def test_a_saved_sequence_has_its_checkpoints(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A loaded sequence goes back as the saved one would have, independent of what was freed in between."""
        if not (keeper.capabilities.states and isinstance(keeper, StateKeeper)):
            pytest.skip("optional: the runner saves no sequences (capabilities.states)")
        sequence = self._holding(keeper, driver, prompts[0][:14], (4, 9))
        data = keeper.save(sequence)
        driver.free(sequence)
        driver.holding(prompts[1])
        loaded = driver.adopt(keeper.load(data))

        for wanted, least in ((12, 9), (8, 4)):
            kept = keeper.truncate(loaded, wanted)
            assert least <= kept <= wanted
            self.assert_replays(driver, loaded, prompts[0][:kept] + prompts[2][:4])

    def test_the_last_checkpoints_are_saved(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """Those before the end: the file is as large as without the earlier ones, and without one at the end."""
        if not (keeper.capabilities.states and isinstance(keeper, StateKeeper)):
            pytest.skip("optional: the runner saves no sequences (capabilities.states)")
        token_ids, last = prompts[0][:14], (5, 7, 9, 12)
        assert len(last) == NUM_SAVED_CHECKPOINTS
        sequence = self._holding(keeper, driver, token_ids, last)
        num_bytes = keeper.save(sequence).nbytes
        driver.free(sequence)
        sequence = self._holding(keeper, driver, token_ids, (3, *last, 14))
        data = keeper.save(sequence)
        driver.free(sequence)

        assert data.nbytes == num_bytes
        loaded = driver.adopt(keeper.load(data))
        assert [keeper.kept_length(loaded, length) for length in last] == list(last)
        assert keeper.truncate(loaded, last[0]) == last[0]
        self.assert_replays(driver, loaded, token_ids[: last[0]] + prompts[2][:4])

    def test_random_walk_with_checkpoints(
        self, keeper: CheckpointKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """After any order of append, keep, truncate, fork and free, sequences behave as if written at once."""
        choose = random.Random(11)
        tokens = [token_id for prompt in prompts for token_id in prompt]
        held: dict[int, list[int]] = {}
        went_back = 0
        for _ in range(2 * self.num_random_steps):
            if len(held) < 2:
                held[driver.open()] = []
            sequence = choose.choice(list(held))
            action = choose.choice(("append", "append", "truncate", "fork", "free"))
            if action == "append" and len(held[sequence]) < 32:
                more = choose.choices(tokens, k=choose.choice((1, 1, 5)))
                rows = driver.feed(sequence, more, "all")
                held[sequence] += more
                what = (
                    "a sequence after appends, checkpoints, truncations and forks, against the same tokens in one pass"
                )
                self.assert_same(rows, driver.alone(held[sequence])[-len(more) :], keeper.capabilities, what)
                if choose.random() < 0.7:
                    keeper.keep_checkpoint(sequence)
            elif action == "truncate":
                wanted = choose.randint(0, len(held[sequence]))
                planned, kept = keeper.kept_length(sequence, wanted), keeper.truncate(sequence, wanted)
                assert planned == kept
                went_back += 0 < kept < len(held[sequence])
                del held[sequence][kept:]
            elif action == "fork" and len(held) < 3:
                copy, shared = driver.fork(sequence, choose.randint(0, len(held[sequence])))
                held[copy] = held[sequence][:shared]
            elif action == "free" and choose.random() < 0.5:
                driver.free(sequence)
                del held[sequence]
            assert {handle: keeper.length(handle) for handle in held} == {
                handle: len(token_ids) for handle, token_ids in held.items()
            }
        assert went_back, "no truncation of the walk kept a part"

    @staticmethod
    def _holding(keeper: CheckpointKeeper, driver: RunnerDriver, token_ids: list[int], places: tuple[int, ...]) -> int:
        """Open a sequence that holds ``token_ids`` and has checkpoints at ``places``."""
        sequence, start = driver.open(), 0
        for place in (*places, len(token_ids)):
            if place > start:
                driver.feed(sequence, token_ids[start:place], "none")
            if place in places:
                keeper.keep_checkpoint(sequence)
            start = place
        return sequence
