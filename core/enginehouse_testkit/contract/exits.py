"""Contract of runners with early exit of tokens; a runner without layer access skips it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner
from enginehouse.contract.exit_policy import ExitOutput, ExitView, LayerAccess
from enginehouse_testkit.contract.base import ContractBase
from enginehouse_testkit.contract.driver import RunnerDriver

__all__ = ["ExitsContract", "LeaveAt"]


@define(eq=False)
class LeaveAt:
    """A policy in which every token exits after one layer, or none; reads all that it may."""

    layers: tuple[int, ...]
    layer: int | None
    shown: list[tuple[tuple[int, ...], ...]] = field(factory=list)

    def leaves(self, view: ExitView) -> list[bool]:
        """See :class:`enginehouse.contract.exit_policy.BoundExitPolicy`."""
        arrays = [_on_host(array) for array in (view.hidden, view.previous_hidden, view.logits())]
        assert all(array.dtype == np.float32 for array in arrays)
        self.shown.append(tuple(array.shape for array in arrays))
        return [view.layer == self.layer] * len(view.hidden)


class ExitsContract(ContractBase):
    """Tokens that exit get the logits of that layer; all others, and prompts, those of all layers."""

    @pytest.fixture
    def left_early(self, runner: Runner) -> Iterator[LayerAccess]:
        """The runner; afterwards its policy is removed."""
        if not isinstance(runner, LayerAccess) or not runner.capabilities.exit_layers:
            pytest.skip("optional: the runner gives no access to its layers (capabilities.exit_layers)")
        yield runner
        runner.use_exit_policy(None)

    def test_who_leaves_gets_the_logits_of_fewer_layers(
        self, driver: RunnerDriver, left_early: LayerAccess, prompts: list[list[int]]
    ) -> None:
        """The logits equal those of a span with ``num_layers``, and the row reports it."""
        layers, prompt = left_early.capabilities.exit_layers, prompts[0]
        for layer in (layers[0], layers[-1]):
            shallow = driver.holding(prompt[:-1])
            expected = driver.forward(attrs.evolve(driver.span(shallow, prompt[-1:]), num_layers=layer))
            left_early.use_exit_policy(LeaveAt(layers, layer))
            span = attrs.evolve(driver.span(driver.holding(prompt[:-1]), prompt[-1:]), may_exit=True)
            output = left_early.forward([span])

            assert isinstance(output, ExitOutput)
            assert list(output.exit_layers) == [layer]
            self.assert_same(output.host(), expected, left_early.capabilities)
            left_early.use_exit_policy(None)

    def test_who_stays_gets_the_logits_of_all_layers(
        self, driver: RunnerDriver, left_early: LayerAccess, prompts: list[list[int]]
    ) -> None:
        """A policy that never exits changes nothing."""
        layers, prompt = left_early.capabilities.exit_layers, prompts[0]
        policy = LeaveAt(layers, None)
        left_early.use_exit_policy(policy)
        span = attrs.evolve(driver.span(driver.holding(prompt[:-1]), prompt[-1:]), may_exit=True)
        output = left_early.forward([span])

        assert list(output.exit_layers) == [left_early.num_layers]  # type: ignore[attr-defined]
        assert len(policy.shown) == len(layers)
        vocab_size = left_early.tokenizer.vocab_size
        assert all(
            rows[0] == 1 and logits == (1, vocab_size) and rows == before for rows, before, logits in policy.shown
        )
        self.assert_same(output.host(), driver.alone(prompt)[-1:], left_early.capabilities)

    def test_only_spans_that_may_leave_are_asked_about(
        self, driver: RunnerDriver, left_early: LayerAccess, prompts: list[list[int]]
    ) -> None:
        """Prompts, and single tokens without ``may_exit``, run through all layers and report it."""
        layers = left_early.capabilities.exit_layers
        policy = LeaveAt(layers, layers[0])
        left_early.use_exit_policy(policy)
        output = left_early.forward([driver.span(driver.open(), prompts[0])])
        rows = output.host().copy()
        last = driver.holding(prompts[1][:-1])
        single = left_early.forward([driver.span(last, prompts[1][-1:])])

        assert not policy.shown
        assert list(output.exit_layers) == list(single.exit_layers) == [left_early.num_layers]  # type: ignore[attr-defined]
        self.assert_same(rows, driver.alone(prompts[0])[-1:], left_early.capabilities)

    def test_sequences_go_on_where_tokens_left(
        self, driver: RunnerDriver, left_early: LayerAccess, prompts: list[list[int]]
    ) -> None:
        """All layers can run on such positions; after truncation, the sequence is as without exits."""
        layers, prompt = left_early.capabilities.exit_layers, prompts[0]
        left_early.use_exit_policy(LeaveAt(layers, layers[0]))
        sequence = driver.holding(prompt[:-3])
        for token_id in prompt[-3:]:
            left_early.forward([attrs.evolve(driver.span(sequence, [token_id]), may_exit=True)])
        left_early.use_exit_policy(None)
        rows = driver.forward(driver.span(sequence, prompt[:1]))

        assert np.isfinite(rows).all()
        if left_early.capabilities.truncate == "any":
            assert left_early.truncate(sequence, len(prompt) - 3) == len(prompt) - 3
            self.assert_replays(driver, sequence, prompt)


def _on_host(array: Any) -> NDArray[np.generic]:
    """Convert an array of the runner's library to numpy; arrays on a GPU are copied first."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
