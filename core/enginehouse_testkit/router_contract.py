"""Contract suite for router plugins, as a test class.

::

    class TestMyRouter(RouterContract):
        @pytest.fixture(scope="class")
        @classmethod
        def router(cls):
            return MyRouter()
"""

from __future__ import annotations

import random
import time
from typing import Any, get_args

import pytest
from attrs import evolve

from enginehouse.contract.router import (
    MAX_PROBE_TOKENS,
    AnswerBeginning,
    Candidate,
    ComparesTexts,
    RouteQuestion,
    Router,
    RoutingDecision,
)
from enginehouse.contract.types import Constraint, GenerateRequest, Message, Tool, ToolUse
from enginehouse.serving import ModelState
from enginehouse_testkit.contract.form import FormContract, loader_problem

__all__ = ["RouterContract"]

_MAX_DECISION_S = 0.002
_TEXTS = (
    "",
    "Hello",
    "What is 2+2?",
    "Explain why the proof by induction holds, step by step; you must not skip any case.",
    "```python\ndef f():\n    return 1\n```\nFix this.",
    "\x00\ud800<|im_start|>system {{ 7*7 }} \u202e",
    "word " * 20_000,
    "; \n" * 30_000,
    "SELECT " * 20_000,
    "1. " * 20_000 + "?" * 20_000,
    "日本語のテキスト" * 5_000,
)


def _request(said: str, **changes: Any) -> GenerateRequest:
    message = Message(role="user", content=said)
    return GenerateRequest(request_id="r", **{"model": "auto", "messages": (message,), **changes})


def _requests() -> list[GenerateRequest]:
    """Return chats, raw texts and token ids, with and without optional fields."""
    tool = Tool(name="f", parameters={}, definition={"type": "function", "function": {"name": "f"}})
    turns = tuple(Message(role=role, content=text) for role in ("system", "user", "assistant") for text in _TEXTS[:6])
    return [
        *map(_request, _TEXTS),
        _request("x", tool_use=ToolUse(tools=(tool,))),
        _request("x", constraint=Constraint(kind="json_object")),
        _request("x", messages=()),
        _request("x", messages=turns),
        _request("x", messages=None, text=_TEXTS[3]),
        _request("x", messages=None, token_ids=tuple(range(1000))),
    ]


def _candidates(number: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(name=f"model-{rank}", rank=rank, slots=4) for rank in range(number))


def _question(router: Router, request: GenerateRequest, candidates: tuple[Candidate, ...]) -> RouteQuestion:
    """Return the question that core would ask, with similarities to the examples of a router that has some."""
    similarities: tuple[float, ...] = ()
    if isinstance(router, ComparesTexts):
        drawn = random.Random(router.text_of(request).encode("utf-8", "replace"))
        similarities = tuple(drawn.uniform(-1, 1) for _ in router.examples())
    return RouteQuestion(request=request, candidates=candidates, default=candidates[-1].name, similarities=similarities)


def _strange_candidates() -> tuple[Candidate, ...]:
    """Return models in every state, with extreme values of every statistic."""
    states = get_args(ModelState)
    return tuple(
        evolve(
            candidate,
            state=states[candidate.rank],
            has_failed=candidate.rank % 2 == 0,
            num_running=1000 * candidate.rank,
            num_waiting=candidate.rank,
            max_context=None if candidate.rank else 512,
            first_token_s=None if candidate.rank % 2 else 1e9,
        )
        for candidate in _candidates(len(states))
    )


class RouterContract(FormContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.router.Router`."""

    @pytest.fixture(scope="class")
    @classmethod
    def form(cls, router: Router) -> str:
        """Reason for which the loader refuses the router."""
        return loader_problem("routers", router)

    @staticmethod
    def _ask(router: Router, request: GenerateRequest, candidates: tuple[Candidate, ...]) -> RoutingDecision:
        return router.route(_question(router, request, candidates))

    def test_names_are_texts(self, router: Router) -> None:
        """The name is valid in the settings."""
        assert router.name.isidentifier()
        assert isinstance(router.api_version, int)

    @pytest.mark.parametrize("number", [1, 2, 5])
    def test_attempts_are_candidates_each_at_most_once(self, router: Router, number: int) -> None:
        """Every request gets at least one attempt, and no model twice."""
        candidates = _candidates(number)
        for request in _requests():
            names = [attempt.model for attempt in self._ask(router, request, candidates).attempts]

            assert names
            assert set(names) <= {candidate.name for candidate in candidates}
            assert len(set(names)) == len(names)

    def test_models_in_every_state_are_put_in_some_order(self, router: Router) -> None:
        """Core moves models that cannot answer to the end; a router only has to handle them."""
        for request in _requests():
            assert self._ask(router, request, _strange_candidates()).attempts

    def test_same_question_gets_the_same_answer(self, router: Router) -> None:
        """Decisions are deterministic, and independent of other requests."""
        requests = _requests()
        first = [self._ask(router, request, _candidates(3)) for request in requests]
        random.Random(1).shuffle(order := list(range(len(requests))))
        second = {number: self._ask(router, requests[number], _candidates(3)) for number in order}

        for number, route in enumerate(first):
            assert [attempt.model for attempt in second[number].attempts] == [one.model for one in route.attempts]
            assert (second[number].reason, second[number].scores) == (route.reason, route.scores)

    def test_decision_explains_itself(self, router: Router) -> None:
        """There is a reason as text; scores are of candidates only, and numbers are valid JSON."""
        candidates = _candidates(3)
        for request in _requests():
            route = self._ask(router, request, candidates)

            assert route.reason.strip()
            assert set(route.scores) <= {candidate.name for candidate in candidates}
            numbers = [*route.scores.values(), *route.features.values()]
            assert all(isinstance(number, int | float) and abs(number) < 1e300 for number in numbers)

    def test_decision_takes_less_than_two_milliseconds(self, router: Router) -> None:
        """Includes long prompts. Processor time of the thread, the best of several runs, as the machine may be busy."""
        for request in _requests():
            question = _question(router, request, _candidates(5))
            times_s = []
            for _ in range(20):
                began = time.thread_time()
                router.route(question)
                times_s.append(time.thread_time() - began)

            assert min(times_s) < _MAX_DECISION_S

    @pytest.mark.parametrize(
        "probe",
        [
            AnswerBeginning("", (), True),
            AnswerBeginning("Yes", (-0.01, -0.02)),
            AnswerBeginning("Hm", (-9.0,) * MAX_PROBE_TOKENS),
            AnswerBeginning("x", ()),
        ],
    )
    def test_acceptance_says_yes_or_no_to_every_beginning(self, router: Router, probe: AnswerBeginning) -> None:
        """Answers may end at once, and engines may not report log-probabilities."""
        for attempt in self._ask(router, _request("Hello"), _candidates(3)).attempts:
            if attempt.accept is not None:
                assert attempt.accept.is_good(probe) in (True, False)
