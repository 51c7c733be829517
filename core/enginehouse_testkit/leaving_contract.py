"""Contract suite for runners with early exit of tokens, over model families, as a test class.

::

    class TestLeaving(LeavingContract):
        @pytest.fixture(params=["qwen3", "gemma3_text"])
        def family(self, request):
            return request.param

        @pytest.fixture
        def open_family(self):
            return my_function  # from a family's name to a runner of a small random model of four layers

        @pytest.fixture
        def logits_after_leaving(self):
            return another_function  # see below

The runner contract tests the same for a single model; this one compares each family with its own library, and lets the
tokens of a batch exit at different layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.exit_policy import ExitOutput, ExitView, LayerAccess
from enginehouse_testkit.contract.driver import Rows, largest_difference
from enginehouse_testkit.depth_contract import OpenFamily

__all__ = ["AfterLeaving", "LeavingContract"]

AfterLeaving = Callable[[str, NDArray[np.int32], Sequence[int], int], Rows]
"""Reference by the library alone: logits of the last token in a model whose layers after a given one do not change the
states of some positions. Takes the family, the tokens, these positions, and the number of layers that change them.
"""


@define(eq=False)
class _Leaves:
    """Lets all tokens exit after a given layer, or none; records its arguments."""

    layers: tuple[int, ...]
    at: int | None
    reads_logits: bool = False
    shown: list[tuple[int, NDArray[np.generic], NDArray[np.generic]]] = field(factory=list)

    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        """See :class:`enginehouse.contract.exit_policy.BoundExitPolicy`."""
        self.shown.append((view.layer, _copied(view.hidden), _copied(view.previous_hidden)))
        if self.reads_logits:
            view.logits()
        return np.full(len(view.hidden), view.layer == self.at)


class _OneLeaves:
    """Lets the first of the remaining tokens exit after each layer."""

    layers = (1, 2, 3)

    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        """See :class:`enginehouse.contract.exit_policy.BoundExitPolicy`."""
        return np.array([row == 0 for row in range(len(view.hidden))])


class LeavingContract:
    """Tests every guarantee of `LayerAccess`, against the library alone and over model families.

    Attributes:
        usual: the family for tests that need only one.
        max_logit_difference: between rows that were computed differently.
        max_batch_difference: between rows of a batch and those that are computed alone.
        num_token_ids: token ids below this one are used; every family has them.
        hidden_size: width of the states of the usual family.
        refusal: error message for a model without early exit; a regular expression.
        mixes_depths: spans of fewer layers may be in one batch with tokens that exit.
    """

    usual: ClassVar[str] = "qwen3"
    max_logit_difference: ClassVar[float] = 1e-4
    max_batch_difference: ClassVar[float] = 1e-4
    num_token_ids: ClassVar[int] = 90
    hidden_size: ClassVar[int] = 64
    refusal: ClassVar[str] = "layers"
    mixes_depths: ClassVar[bool] = True

    @pytest.fixture
    def token_ids(self) -> NDArray[np.int32]:
        """Forty tokens, more than a window holds."""
        return (np.arange(40, dtype=np.int32) * 31 + 5) % self.num_token_ids

    @pytest.fixture
    def compared_family(self, family: str) -> str:
        """A family whose library can be stopped between its layers."""
        return family

    @pytest.fixture
    def batched_family(self, family: str) -> str:
        """A family for which batches are computed."""
        return family

    @pytest.fixture
    def opened(self, open_family: OpenFamily) -> Iterator[Callable[[str], Any]]:
        """Opens models that are closed after the test."""
        opened: list[Runner] = []

        def open_one(family: str) -> Runner:
            opened.append(open_family(family))
            return opened[-1]

        yield open_one
        for runner in opened:
            runner.close()

    def num_prompt_tokens(self, family: str) -> int:
        """Number of prompt tokens, after which three more are compared with the library's."""
        return 9

    def check_layers(self, runner: Any, layers: Sequence[int]) -> None:
        """Check the exit layers of four tokens of a batch: one after each layer."""
        assert sorted(layers) == [1, 2, 3, 4]

    @pytest.mark.parametrize("reads_logits", [False, True])
    def test_who_leaves_gets_the_logits_of_that_layer(
        self, opened: Callable[[str], Any], family: str, token_ids: NDArray[np.int32], reads_logits: bool
    ) -> None:
        """The first token after a prompt gets the logits of the shorter model, also if the policy reads no logits."""
        runner = opened(family)
        assert isinstance(runner, LayerAccess)
        assert runner.num_layers == 4
        shallow = _holding(runner, token_ids[:9])
        expected = runner.forward([Span(shallow, 9, token_ids[9:10], "last", 2)]).host().copy()
        runner.use_exit_policy(_Leaves((1, 2, 3), 2, reads_logits))
        found, layers = _decode(runner, [_holding(runner, token_ids[:9])], token_ids[9:10])

        assert layers == [2]
        assert largest_difference(found, expected) < self.max_logit_difference

    def test_layers_above_get_keys_and_values_of_the_state_that_left(
        self,
        opened: Callable[[str], Any],
        compared_family: str,
        logits_after_leaving: AfterLeaving,
        token_ids: NDArray[np.int32],
    ) -> None:
        """Compared with a model whose upper layers do not change the tokens that exited."""
        runner = opened(compared_family)
        runner.use_exit_policy(_Leaves((2,), 2))
        length = self.num_prompt_tokens(compared_family)
        sequence = _holding(runner, token_ids[:length])
        for place in (length, length + 1):
            _decode(runner, [sequence], token_ids[place : place + 1])
        runner.use_exit_policy(None)
        whole = token_ids[: length + 3]
        found = runner.forward([Span(sequence, length + 2, whole[-1:])]).host()
        expected = logits_after_leaving(compared_family, whole, [length, length + 1], 2)

        assert largest_difference(found, expected) < 1e-3

    def test_a_policy_that_never_lets_go_changes_nothing(
        self, opened: Callable[[str], Any], token_ids: NDArray[np.int32]
    ) -> None:
        """It is called after the layers that it named, and no others."""
        runner = opened(self.usual)
        plain = _holding(runner, token_ids[:9])
        expected = runner.forward([Span(plain, 9, token_ids[9:10])]).host().copy()
        policy = _Leaves((1, 3), None, reads_logits=True)
        runner.use_exit_policy(policy)
        found, layers = _decode(runner, [_holding(runner, token_ids[:9])], token_ids[9:10])

        assert layers == [4]
        assert largest_difference(found, expected) < 1e-5
        assert [layer for layer, _, _ in policy.shown] == [1, 3]

    def test_states_are_those_behind_and_before_the_layer(
        self, opened: Callable[[str], Any], token_ids: NDArray[np.int32]
    ) -> None:
        """The state after one layer is the state before the next one."""
        runner = opened(self.usual)
        policy = _Leaves((1, 2), None)
        runner.use_exit_policy(policy)
        _decode(runner, [_holding(runner, token_ids[:9])], token_ids[9:10])
        (_, behind_first, before_first), (_, behind_second, before_second) = policy.shown

        assert behind_first.shape == (1, self.hidden_size)
        assert np.array_equal(before_second, behind_first)
        assert not np.allclose(behind_first, before_first)
        assert not np.allclose(behind_second, before_second)

    def test_tokens_of_a_batch_leave_one_by_one(
        self, opened: Callable[[str], Any], batched_family: str, token_ids: NDArray[np.int32]
    ) -> None:
        """Each token, and those after it, get the same rows as alone; lengths and windows differ."""
        runner = opened(batched_family)
        prompts = [token_ids[:9], token_ids[3:17], token_ids[20:25], token_ids[1:8]]
        together = [_holding(runner, prompt) for prompt in prompts]
        runner.use_exit_policy(_OneLeaves())
        token = np.array([7], np.int32)
        rows, layers = _decode(runner, together, token)
        self.check_layers(runner, layers)
        for index, prompt in enumerate(prompts):
            runner.use_exit_policy(_Leaves((1, 2, 3), layers[index]))
            alone = _holding(runner, prompt)
            row, _ = _decode(runner, [alone], token)
            assert largest_difference(rows[index], row[0]) < self.max_batch_difference
            runner.use_exit_policy(None)
            ends = [
                runner.forward([Span(one, runner.length(one), token_ids[:3])]).host().copy()
                for one in (together[index], alone)
            ]
            assert largest_difference(ends[0], ends[1]) < self.max_batch_difference
            runner.free_sequence(alone)

    def test_prompts_beside_answers_run_through_all_layers(
        self, opened: Callable[[str], Any], token_ids: NDArray[np.int32]
    ) -> None:
        """Also a prompt of one token, and a draft of fewer layers; rows and layers are in span order."""
        runner = opened(self.usual)
        alone = runner.forward([Span(runner.open_sequence(), 0, token_ids[:1])]).host().copy()
        runner.use_exit_policy(_Leaves((1,), 1))
        first, second, third = (_holding(runner, token_ids[:size]) for size in (5, 6, 4))
        drafts = [Span(third, 4, token_ids[4:6], "all", 2)] if self.mixes_depths else []
        output = runner.forward(
            [
                Span(first, 5, token_ids[5:6], may_exit=True),
                Span(runner.open_sequence(), 0, token_ids[:1]),
                *drafts,
                Span(second, 6, token_ids[6:7], may_exit=True),
            ]
        )

        assert list(output.exit_layers) == [1, 4, *([2, 2] if drafts else []), 1]
        assert output.host().shape[0] == len(output.exit_layers)
        assert largest_difference(output.host()[1], alone[0]) < self.max_logit_difference

    def test_a_model_whose_layers_cannot_be_left_is_refused(self, opened: Callable[[str], Any]) -> None:
        """Refused when the policy is set, not when a token would exit."""
        runner = opened(self.usual)
        runner.capabilities = attrs.evolve(runner.capabilities, exit_layers=())
        with pytest.raises(ModelLoadError, match=self.refusal):
            runner.use_exit_policy(_Leaves((1,), 1))


def _decode(runner: Any, sequences: Sequence[int], token: NDArray[np.int32]) -> tuple[Rows, list[int]]:
    """Run one step of several sequences; return logits and layers."""
    output = runner.forward([Span(one, runner.length(one), token, may_exit=True) for one in sequences])
    assert isinstance(output, ExitOutput)
    return output.host().copy(), list(output.exit_layers)


def _holding(runner: Runner, token_ids: NDArray[np.int32]) -> int:
    """Open a sequence that holds these tokens."""
    sequence = runner.open_sequence()
    runner.forward([Span(sequence, 0, token_ids, "none")])
    return sequence


def _copied(array: Any) -> NDArray[np.generic]:
    """Copy an array of any library to the host."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array).copy()
