"""Contract of sequence handles: open, free, length, truncate, fork, and the count of free positions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from enginehouse.contract.backend import CutPlanner, Runner
from enginehouse.contract.errors import CacheFull
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver

__all__ = ["SequenceContract"]


class SequenceContract(ContractBase):
    """A sequence is determined by its token ids, independent of the operations that produced it."""

    def test_capabilities_are_plausible(self, runner: Runner) -> None:
        """The scheduler relies on these numbers."""
        capabilities = runner.capabilities

        assert capabilities.max_sequences >= 4, "the suite needs four sequences"
        assert capabilities.max_batch_tokens >= 32, "the suite needs batches of 32 tokens"
        assert 1 <= capabilities.max_context == runner.info.max_context
        assert 0 <= runner.free_tokens() <= capabilities.cache_tokens
        most = capabilities.max_sequences * capabilities.max_context
        assert capabilities.cache_tokens <= most, (
            f"cache_tokens is {capabilities.cache_tokens}, but {capabilities.max_sequences} sequences (max_sequences) "
            f"of {capabilities.max_context} tokens (max_context) hold at most {most}"
        )

    def test_open_gives_empty_sequences(self, driver: RunnerDriver) -> None:
        """Handles are distinct, and their sequences empty."""
        handles = [driver.open() for _ in range(3)]

        assert len(set(handles)) == 3
        assert [driver.runner.length(handle) for handle in handles] == [0, 0, 0]

    def test_open_raises_when_all_handles_are_taken(self, driver: RunnerDriver) -> None:
        """One more than ``max_sequences`` is refused; a freed handle can be opened again."""
        handles = [driver.open() for _ in range(driver.runner.capabilities.max_sequences)]
        with pytest.raises(CacheFull):
            driver.runner.open_sequence()
        driver.free(handles[0])

        assert driver.runner.length(driver.open()) == 0

    def test_length_counts_tokens(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Each forward pass adds the length of its span."""
        sequence = driver.open()
        driver.feed(sequence, prompts[0][:5])
        assert driver.runner.length(sequence) == 5
        driver.feed(sequence, prompts[0][5:6])
        assert driver.runner.length(sequence) == 6

    def test_free_gives_positions_back(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Free positions decrease while sequences grow, and are restored by freeing."""
        counts = [driver.runner.free_tokens()]
        for prompt in prompts[:3]:
            driver.holding(prompt)
            counts.append(driver.runner.free_tokens())
        driver.free_all()

        assert counts == sorted(counts, reverse=True)
        assert driver.runner.free_tokens() == counts[0]

    def test_handles_are_reused_clean(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """No data of a freed sequence is visible in the next one."""
        for prompt in prompts:
            sequence = driver.holding(prompt[:-1])
            self.assert_replays(driver, sequence, prompt)
            driver.free(sequence)

    @pytest.mark.parametrize("dropped", [0, 1, 3, 100])
    def test_truncate_then_replay(self, driver: RunnerDriver, prompts: list[list[int]], dropped: int) -> None:
        """The length that ``truncate`` returns is really kept; other tokens may follow."""
        sequence = driver.holding(prompts[0])
        wanted = max(len(prompts[0]) - dropped, 0)
        kept = driver.runner.truncate(sequence, wanted)

        assert kept == driver.runner.length(sequence)
        assert 0 <= kept <= wanted
        if driver.runner.capabilities.truncate == "any" or dropped == 0:
            assert kept == wanted
        if driver.runner.capabilities.truncate == "none" and dropped:
            assert kept == 0
        what = f"a sequence truncated to {kept} tokens, continued with others"
        self.assert_replays(driver, sequence, prompts[0][:kept] + prompts[1][:5], what)

    def test_truncate_beyond_the_end_keeps_all(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A greater length is not an error and adds nothing."""
        sequence = driver.holding(prompts[0])

        assert driver.runner.truncate(sequence, len(prompts[0]) + 7) == len(prompts[0])
        assert driver.runner.length(sequence) == len(prompts[0])

    def test_truncate_to_nothing_gives_positions_back(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """A sequence truncated to length 0 equals a new one."""
        sequence = driver.open()
        before = driver.runner.free_tokens()
        driver.feed(sequence, prompts[0])

        assert driver.runner.truncate(sequence, 0) == 0
        assert driver.runner.free_tokens() == before
        self.assert_replays(driver, sequence, prompts[1])

    @pytest.mark.parametrize("dropped", [0, 1, 4, 100])
    def test_fork_then_replay(self, driver: RunnerDriver, prompts: list[list[int]], dropped: int) -> None:
        """A fork has the length that it reports and leaves its source unchanged; both continue independently."""
        prompt = prompts[0]
        source = driver.holding(prompt)
        wanted = max(len(prompt) - dropped, 0)
        copy, shared = driver.fork(source, wanted)

        assert driver.runner.length(copy) == shared <= wanted
        assert driver.runner.length(source) == len(prompt)
        if driver.runner.capabilities.fork == "none":
            assert shared == 0
        elif driver.runner.capabilities.truncate == "any" or dropped == 0:
            assert shared == wanted
        expected = f"a fork of {shared} tokens against a sequence that was fed the same tokens"
        self.assert_replays(driver, copy, prompt[:shared] + prompts[1][:4], f"{expected}: are keys and values copied?")
        changed = "the source of a fork, after tokens were appended to the fork"
        self.assert_replays(driver, source, prompt + prompts[2][:4], f"{changed}: do the two share memory?")

    @pytest.mark.parametrize("dropped", [0, 1, 4, 100])
    def test_a_planned_cut_is_the_one_that_is_made(
        self, driver: RunnerDriver, prompts: list[list[int]], dropped: int
    ) -> None:
        """``fork`` and ``truncate`` keep the planned length; planning changes nothing."""
        planner = driver.runner
        if not isinstance(planner, CutPlanner):
            pytest.skip("optional: the runner does not plan cuts (kept_length of CutPlanner)")
        source = driver.holding(prompts[0])
        wanted = max(len(prompts[0]) - dropped, 0)
        planned = planner.kept_length(source, wanted)

        assert planned == planner.kept_length(source, wanted) <= wanted
        assert planner.kept_length(source, len(prompts[0]) + 7) == planner.length(source) == len(prompts[0])
        if planner.capabilities.fork != "none":
            assert driver.fork(source, wanted)[1] == planned
        assert planner.truncate(source, wanted) == planned

    def test_fork_outlives_its_source(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Positions are kept while at least one sequence holds them."""
        source = driver.holding(prompts[0])
        copy, shared = driver.fork(source, len(prompts[0]))
        driver.free(source)
        driver.holding(prompts[1])  # would overwrite positions that were freed too early

        self.assert_replays(driver, copy, prompts[0][:shared] + prompts[2][:4])

    def test_fork_counts_positions(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Shared positions are counted once; freeing one sharer releases only the positions that it alone held."""
        start = driver.runner.free_tokens()
        source = driver.holding(prompts[0])
        before = driver.runner.free_tokens()
        copy, _ = driver.fork(source, len(prompts[0]))
        if driver.runner.capabilities.fork == "share":
            assert driver.runner.free_tokens() == before
            driver.free(source)
            assert driver.runner.free_tokens() == before
        else:
            driver.free(source)
        driver.free(copy)

        assert driver.runner.free_tokens() == start

    def test_random_walk_over_all_operations(self, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """After any order of append, truncate, fork and free, sequences behave as if written at once."""
        choose = random.Random(7)
        tokens = [token_id for prompt in prompts for token_id in prompt]
        held: dict[int, list[int]] = {}
        for _ in range(self.num_random_steps):
            if len(held) < 2:
                held[driver.open()] = []
            sequence = choose.choice(list(held))
            action = choose.choice(("append", "append", "truncate", "fork", "free"))
            if action == "append" and len(held[sequence]) < 32:
                more = choose.choices(tokens, k=choose.choice((1, 1, 5)))
                rows = driver.feed(sequence, more, "all")
                held[sequence] += more
                expected = driver.alone(held[sequence])[-len(more) :]
                what = "a sequence after appends, truncations and forks, against the same tokens in one pass"
                self.assert_same(rows, expected, driver.runner.capabilities, what)
            elif action == "truncate":
                kept = driver.runner.truncate(sequence, choose.randint(0, len(held[sequence])))
                del held[sequence][kept:]
            elif action == "fork" and len(held) < 3:
                copy, shared = driver.fork(sequence, choose.randint(0, len(held[sequence])))
                held[copy] = held[sequence][:shared]
            elif action == "free":
                driver.free(sequence)
                del held[sequence]
            assert {handle: driver.runner.length(handle) for handle in held} == {
                handle: len(token_ids) for handle, token_ids in held.items()
            }

    def test_close_is_idempotent(self, make_runner: Callable[[], Runner]) -> None:
        """Closing twice, also with open sequences, is not an error."""
        runner = make_runner()
        runner.open_sequence()
        runner.close()
        runner.close()
