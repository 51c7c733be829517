"""Contract suite for exit policies, as a test class.

::

    class TestMyPolicy(ExitPolicyContract):
        @pytest.fixture(scope="class")
        @classmethod
        def exit_policy(cls):
            return MyExitPolicy()

It decides for the fake model, and for made-up states and logits. ``policy_options`` are its settings.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.exit_policy import BoundExitPolicy, ExitContext, ExitPolicy
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.settings.config import structure_options
from enginehouse_testkit.contract.form import FormContract, loader_problem
from enginehouse_testkit.contract.imports import packages_imported_by
from enginehouse_testkit.contract.steps import events_of
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

__all__ = ["ExitPolicyContract"]

_NUM_LAYERS = 8
_PROMPT = [ord(character) for character in "what comes next?"]


@frozen(eq=False)
class _View:
    """See :class:`enginehouse.contract.exit_policy.ExitView`."""

    layer: int
    hidden: NDArray[np.float32]
    previous_hidden: NDArray[np.float32]
    rows: NDArray[np.float32]

    def logits(self) -> NDArray[np.float32]:
        """Return (num_rows, vocab_size) float32."""
        return self.rows

    @classmethod
    def random(cls, layer: int, num_rows: int, seed: int, scale: float = 3.0) -> _View:
        """Create a view of normally distributed numbers; the logits' spread is ``scale``."""
        rng = np.random.default_rng(seed)
        hidden, before = rng.standard_normal((2, num_rows, 16), np.float32)
        return cls(layer, hidden, before, rng.standard_normal((num_rows, 300), np.float32) * np.float32(scale))

    def row(self, index: int) -> _View:
        """Return a view of one row."""
        one = slice(index, index + 1)
        return _View(self.layer, self.hidden[one], self.previous_hidden[one], self.rows[one])


class ExitPolicyContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.exit_policy.ExitPolicy`.

    Attributes:
        light_packages: packages that the plugin may import before it is bound.
        policy_options: its settings, as plain data.
    """

    light_packages: ClassVar[frozenset[str]] = frozenset({"numpy"})
    policy_options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, exit_policy: ExitPolicy) -> str:
        """Reason for which the loader refuses the exit policy."""
        return loader_problem("exit_policies", exit_policy)

    @pytest.fixture
    def bound(self, exit_policy: ExitPolicy) -> BoundExitPolicy:
        """The policy, bound to a model of eight layers."""
        return self._bind(exit_policy)

    def _bind(self, exit_policy: ExitPolicy) -> BoundExitPolicy:
        options = structure_options(exit_policy.options, self.policy_options, "exit_policy")
        return exit_policy.bind(ExitContext(_NUM_LAYERS, tuple(range(1, _NUM_LAYERS))), options)

    def test_its_import_is_cheap(self, exit_policy: ExitPolicy) -> None:
        """Every start pays for its imports."""
        found = packages_imported_by(exit_policy, None, "assert subject.name")

        assert found <= self.light_packages

    def test_it_is_asked_behind_layers_that_can_be_left(self, bound: BoundExitPolicy) -> None:
        """Layers are distinct, in rising order, and do not include the last one."""
        assert bound.layers
        assert list(bound.layers) == sorted(set(bound.layers))
        assert 1 <= bound.layers[0] <= bound.layers[-1] < _NUM_LAYERS

    @pytest.mark.parametrize("num_rows", [1, 2, 7])
    def test_the_answer_is_a_mask(self, bound: BoundExitPolicy, num_rows: int) -> None:
        """One bool per row; arguments are not changed."""
        for layer in bound.layers:
            view = _View.random(layer, num_rows, seed=layer)
            copies = [array.copy() for array in (view.hidden, view.previous_hidden, view.rows)]
            mask = np.asarray(bound.leaves(view))

            assert mask.shape == (num_rows,)
            assert mask.dtype == np.bool_
            for array, copy in zip((view.hidden, view.previous_hidden, view.rows), copies, strict=True):
                assert np.array_equal(array, copy)

    def test_rows_do_not_depend_on_each_other(self, bound: BoundExitPolicy) -> None:
        """The decision for a token does not depend on its batch."""
        for seed in range(10):
            view = _View.random(bound.layers[0], 6, seed, scale=1.0 + 2 * seed)
            together = np.asarray(bound.leaves(view)).tolist()

            assert [bool(np.asarray(bound.leaves(view.row(index)))[0]) for index in range(6)] == together

    def test_strange_states_are_answered(self, bound: BoundExitPolicy) -> None:
        """Zeros, and logits that exclude tokens, are handled."""
        zeros = np.zeros((2, 16), np.float32)
        rows = np.full((2, 300), -np.inf, np.float32)
        rows[:, 7] = 1.0

        for logits in (np.zeros((2, 300), np.float32), rows):
            assert np.asarray(bound.leaves(_View(bound.layers[-1], zeros, zeros, logits))).shape == (2,)

    def test_what_is_reported_is_what_happened(self, exit_policy: ExitPolicy) -> None:
        """Each token reports its number of layers; the final statistics are their sums."""
        runner = FakeRunner(FakeOptions(num_layers=_NUM_LAYERS))
        bound = self._bind(exit_policy)
        runner.use_exit_policy(bound)
        engine = StepEngine(runner, EngineSettings(), {})
        sampling, stopping = SamplingParams(temperature=0, num_logprobs=0), StopParams(max_tokens=60, ignore_eos=True)
        request = EngineRequest(request_id="r", sampling=sampling, stopping=stopping, token_details=True)
        engine.add(request, _PROMPT)
        layers: list[int | None] = []
        for _, event in events_of(engine):
            if isinstance(event, TextDelta):
                layers += [entry.details.exit_layer for entry in event.logprobs or () if entry.details]
            elif isinstance(event, RequestFinished):
                finished = event
        engine.close()
        early = [layer for layer in layers if layer is not None and layer < _NUM_LAYERS]

        assert len(layers) == finished.usage.completion_tokens == 60
        assert layers[0] == _NUM_LAYERS, "the first token belongs to the prompt"
        assert set(early) <= set(bound.layers)
        assert finished.usage.early_exit_tokens == len(early)
        assert finished.usage.skipped_layers == sum(_NUM_LAYERS - layer for layer in early)
