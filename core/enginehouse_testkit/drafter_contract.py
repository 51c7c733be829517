"""Contract suite for drafters, as a test class.

::

    class TestMyDrafter(DrafterContract):
        @pytest.fixture(scope="class")
        @classmethod
        def drafter(cls):
            return MyDrafter()

It drafts for the fake model, which supports early exit after any of its layers and has a draft head. A drafter with a
second model gets another fake one if ``uses_second_model`` is set. ``drafter_options`` are its settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import Span
from enginehouse.contract.drafter import NUM_GRADES, BoundDrafter, DraftContext, Drafter, DraftTask
from enginehouse.contract.types import EngineRequest, EngineSettings, RequestFinished, SamplingParams, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse.settings.config import structure_options
from enginehouse_testkit.contract.form import FormContract, loader_problem
from enginehouse_testkit.contract.imports import packages_imported_by
from enginehouse_testkit.contract.steps import events_of
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

__all__ = ["DrafterContract"]

_OPTIONS = FakeOptions(context=512, num_layers=4, slots=4, draft_head=True)
_PROMPT = [ord(character) for character in "one two three, one two three, one two "]
_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9, seed=3),
    "penalised": SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.2),
    "with log-probabilities": SamplingParams(temperature=1.0, seed=5, num_logprobs=2),
}
_COUNTS = ("work",)  # event fields about drafts


class DrafterContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.drafter.Drafter`.

    Attributes:
        light_packages: packages that the plugin may import before it is bound.
        uses_second_model: it needs a second model.
        drafter_options: its settings, as plain data.
    """

    light_packages: ClassVar[frozenset[str]] = frozenset({"numpy"})
    uses_second_model: ClassVar[bool] = False
    drafter_options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, drafter: Drafter) -> str:
        """Reason for which the loader refuses the drafter."""
        return loader_problem("drafters", drafter)

    @pytest.fixture
    def runner(self) -> FakeRunner:
        """The model that is drafted for."""
        return FakeRunner(_OPTIONS)

    @pytest.fixture
    def bound(self, drafter: Drafter, runner: FakeRunner) -> Iterator[BoundDrafter]:
        """The drafter, bound to that model."""
        bound = self._bind(drafter, runner)
        yield bound
        bound.shutdown()

    def _bind(self, drafter: Drafter, runner: FakeRunner) -> BoundDrafter:
        options = structure_options(drafter.options, self.drafter_options, "drafter")
        second = (lambda: FakeRunner(_OPTIONS)) if self.uses_second_model else None
        return drafter.bind(DraftContext(runner, _OPTIONS.slots, second), options)

    def test_its_import_is_cheap(self, drafter: Drafter) -> None:
        """Every start pays for its imports."""
        found = packages_imported_by(drafter, None, "assert subject.name")

        assert found <= self.light_packages

    def test_it_says_how_often_it_is_right(self, bound: BoundDrafter) -> None:
        """The prior is the share of draft tokens expected to be accepted."""
        assert 0.0 < bound.prior < 1.0
        assert isinstance(bound.is_free, bool)

    @pytest.mark.parametrize("max_tokens", [1, 2, 16])
    def test_a_task_is_answered_with_token_ids(self, bound: BoundDrafter, runner: FakeRunner, max_tokens: int) -> None:
        """Each task gets None, or ids of the vocabulary and a score."""
        texts = [_PROMPT, _PROMPT[:5], [*_PROMPT, *_PROMPT]]
        for tasks in _growing_tasks(bound, runner, texts, max_tokens):
            answers = bound.propose(tasks)

            assert len(answers) == len(tasks)
            for draft in answers:
                if draft is not None:
                    assert len(draft.token_ids) >= 1
                    assert all(0 <= token_id < runner.tokenizer.vocab_size for token_id in draft.token_ids)
                    assert 0 <= draft.grade < NUM_GRADES

    def test_it_leaves_the_model_as_it_was(self, bound: BoundDrafter, runner: FakeRunner) -> None:
        """Whatever it computes in the model's cache is removed when it returns."""
        for tasks in _growing_tasks(bound, runner, [_PROMPT, _PROMPT[:9]], 8):
            lengths = [runner.length(task.sequence) for task in tasks]
            texts = [task.token_ids.tolist() for task in tasks]
            bound.propose(tasks)

            assert [runner.length(task.sequence) for task in tasks] == lengths
            assert [task.token_ids.tolist() for task in tasks] == texts
        for task in tasks:
            bound.close(task.session)
            runner.free_sequence(task.sequence)
        assert runner.free_tokens() == runner.capabilities.cache_tokens

    def test_sessions_can_be_opened_again_and_again(self, bound: BoundDrafter) -> None:
        """Closing a session frees its resources."""
        for _ in range(200):
            session = bound.open(np.array(_PROMPT, np.int32), tuple(_PROMPT))
            assert session is not None
            bound.close(session)

    @pytest.mark.parametrize("sampling", _SAMPLINGS.values(), ids=list(_SAMPLINGS))
    @pytest.mark.parametrize("num_choices", [1, 3])
    def test_no_answer_depends_on_it(self, drafter: Drafter, sampling: SamplingParams, num_choices: int) -> None:
        """The output of concurrent requests is the same as without the drafter, except for times."""
        plain = _answers(FakeRunner(_OPTIONS), {}, sampling, num_choices)
        runner = FakeRunner(_OPTIONS)
        drafted = _answers(runner, {drafter.name: self._bind(drafter, runner)}, sampling, num_choices)

        assert drafted == plain


def _growing_tasks(
    bound: BoundDrafter, runner: FakeRunner, texts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[list[DraftTask]]:
    """Yield tasks for growing texts, of which the runner holds all but the last token."""
    opened = []
    for text in texts:
        session = bound.open(np.array(text[:2], np.int32), tuple(_PROMPT))
        assert session is not None
        opened.append((session, runner.open_sequence(), list(text)))
    for length in itertools.chain(range(2, 6), (max(map(len, texts)),)):
        tasks = []
        for session, sequence, text in opened:
            token_ids: NDArray[np.int32] = np.array(text[:length], np.int32)
            held = runner.length(sequence)
            if held < len(token_ids) - 1:
                runner.forward([Span(sequence, held, token_ids[held:-1], "none")])
            tasks.append(DraftTask(session, token_ids, sequence, max_tokens))
        yield tasks


def _answers(
    runner: FakeRunner, drafters: dict[str, BoundDrafter], sampling: SamplingParams, num_choices: int
) -> dict[str, list[Any]]:
    """Return the visible output of three requests, one of which gives the beginning of its answer as a prediction."""
    engine = StepEngine(runner, EngineSettings(slots=4), {}, drafters=drafters)
    seen: dict[str, list[Any]] = {}
    for index in range(3):
        request = EngineRequest(
            request_id=f"request {index}",
            sampling=sampling,
            stopping=StopParams(max_tokens=60, ignore_eos=index == 0),
            num_choices=num_choices,
            prediction_token_ids=tuple(_PROMPT) if index == 1 else (),
        )
        engine.add(request, _PROMPT[index:])
        seen[request.request_id] = []
    for request_id, event in events_of(engine):
        if not isinstance(event, RequestFinished):  # the only event with times and draft counts
            seen[request_id].append(event)
    engine.close()
    return {request_id: _joined(events) for request_id, events in seen.items()}


def _joined(events: Sequence[Any]) -> list[Any]:
    """Events per choice, in an order independent of the tokens per step, without draft counts."""
    told = [
        {name: getattr(event, name) for name in event.__struct_fields__ if name not in _COUNTS} | {"kind": type(event)}
        for event in events
    ]
    return sorted(told, key=lambda event: event["choice"])
