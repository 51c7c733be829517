"""Contract of saved sequences: a loaded sequence continues like the saved one; invalid data changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import pytest

from enginehouse.contract.backend import Runner, StateKeeper
from enginehouse.contract.errors import CacheFull, StateRefused
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver

__all__ = ["StateContract"]

_Damage = Callable[[bytearray], bytearray]

_DAMAGES: dict[str, _Damage] = {
    "nothing is left": lambda data: bytearray(),
    "one byte is left": lambda data: data[:1],
    "its second half is missing": lambda data: data[: len(data) // 2],
    "its last byte is missing": lambda data: data[:-1],
    "there is a byte too many": lambda data: data + b"\0",
    "its first byte differs": lambda data: bytearray([data[0] ^ 255]) + data[1:],
    "its head is all ones": lambda data: bytearray(b"\xff" * min(64, len(data))) + data[64:],
    "it is text": lambda data: bytearray(b"not a saved sequence. " * 40),
}


class StateContract(ContractBase):
    """A sequence may be swapped out of memory and loaded again."""

    @pytest.fixture
    def keeper(self, runner: Runner) -> StateKeeper:
        """The runner, if it can save states."""
        assert runner.capabilities.states <= isinstance(runner, StateKeeper), "states needs save, load and state_format"
        if not runner.capabilities.states:
            pytest.skip("optional: the runner saves no sequences (capabilities.states)")
        return cast(StateKeeper, runner)

    def test_a_loaded_sequence_goes_on_like_the_saved_one(
        self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """Independent of what was computed, freed or appended in between."""
        saved = driver.holding(prompts[0][:-4])
        data = keeper.save(saved)
        expected = driver.feed(saved, prompts[0][-4:], "all")
        driver.free(saved)
        driver.holding(prompts[1])  # takes the positions that were freed
        loaded = driver.adopt(keeper.load(data))

        assert keeper.length(loaded) == len(prompts[0]) - 4
        rows = driver.feed(loaded, prompts[0][-4:], "all")
        self.assert_same(rows, expected, keeper.capabilities)

    def test_saving_changes_nothing(self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """The sequence continues, and the saved data does not change."""
        sequence = driver.holding(prompts[0][:6])
        free_tokens = keeper.free_tokens()
        data = keeper.save(sequence)

        assert keeper.free_tokens() == free_tokens
        self.assert_replays(driver, sequence, prompts[0])
        self.assert_replays(driver, driver.adopt(keeper.load(data)), prompts[0][:6] + prompts[1][:4])

    def test_one_state_can_be_loaded_several_times(
        self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """Each loaded sequence is independent, takes its own positions and gives them back."""
        data = keeper.save(driver.holding(prompts[2][:8]))
        free_tokens = keeper.free_tokens()
        first, second = driver.adopt(keeper.load(data)), driver.adopt(keeper.load(data))

        assert free_tokens - keeper.free_tokens() == 16
        self.assert_replays(driver, first, prompts[2][:8] + prompts[0][:3])
        self.assert_replays(driver, second, prompts[2][:8] + prompts[1][:3])
        driver.free(first)
        driver.free(second)
        assert keeper.free_tokens() == free_tokens

    def test_a_fork_can_be_saved(self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Positions shared with other sequences are saved as well."""
        source = driver.holding(prompts[0])
        copy, shared = driver.fork(source, len(prompts[0]))
        driver.feed(copy, prompts[1][:3], "none")
        data = keeper.save(copy)
        driver.free(source)
        driver.free(copy)

        held = prompts[0][:shared] + prompts[1][:3]
        self.assert_replays(driver, driver.adopt(keeper.load(data)), held + prompts[2][:3])

    def test_a_loaded_sequence_can_be_forked_and_cut(
        self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]
    ) -> None:
        """A loaded sequence supports all operations."""
        loaded = driver.adopt(keeper.load(keeper.save(driver.holding(prompts[0]))))
        copy, shared = driver.fork(loaded, len(prompts[0]) - 2)
        kept = keeper.truncate(loaded, len(prompts[0]) - 1)

        self.assert_replays(driver, copy, prompts[0][:shared] + prompts[1][:3])
        self.assert_replays(driver, loaded, prompts[0][:kept] + prompts[2][:3])

    @pytest.mark.parametrize("damage", _DAMAGES)
    def test_damaged_data_is_refused(
        self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]], damage: str
    ) -> None:
        """StateRefused is raised, nothing changes, and the runner continues to work."""
        sequence = driver.holding(prompts[0][:-2])
        data = bytearray(keeper.save(sequence))
        free_tokens = keeper.free_tokens()
        with pytest.raises(StateRefused):
            keeper.load(memoryview(_DAMAGES[damage](data)))

        assert keeper.free_tokens() == free_tokens
        self.assert_replays(driver, sequence, prompts[0])
        self.assert_replays(driver, driver.adopt(keeper.load(memoryview(data))), prompts[0][:-2] + prompts[3][:3])

    def test_loading_needs_a_handle(self, keeper: StateKeeper, driver: RunnerDriver, prompts: list[list[int]]) -> None:
        """Loading requires a free handle, as opening does."""
        data = keeper.save(driver.holding(prompts[0]))
        for _ in range(keeper.capabilities.max_sequences + 1):
            with contextlib.suppress(CacheFull):
                driver.open()
        with pytest.raises(CacheFull):
            keeper.load(data)

    def test_the_format_is_named(self, keeper: StateKeeper) -> None:
        """Core recognises foreign states by this text."""
        assert keeper.state_format
