"""``POST /v1/route``: the models that a chat would be tried on, with reasons; nothing is generated.

Long prompts are tokenized by the loaded models whose context may be too small for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from enginehouse.api.generation.decoding import Decoded
from enginehouse.api.http.callers import check_model, check_priority
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.router import Candidate
from enginehouse.contract.surface import AnswerRoute, Reply, Route
from enginehouse.pipeline.routing import AUTO, Plan
from enginehouse.serving.background import run_in_thread

__all__ = ["route_route"]


def route_route(state: ApiState) -> Route:
    """Return the route, without a prefix. Its body is that of a chat; ``model`` is optional."""

    async def explain_route(call: Decoded[ChatBody]) -> Reply:
        asked = call.body.model or (AUTO if state.pipeline.is_routed(AUTO) else None)
        if not state.pipeline.is_routed(asked):
            check_model(call.caller, asked, state.manager)
        check_priority(call.caller, call.body.priority)
        chat = await run_in_thread(call.is_large, lambda: call.identify(call.body.request("", **call.body.chat())))
        plan, left_out = await state.pipeline.plan(evolve(chat, model=asked))
        shown = _without_choice(asked, state.manager.find(asked).name) if plan is None else _planned(asked, plan)
        call.unsupported.extend(left_out)
        return Reply(shown)

    return AnswerRoute(
        path="/route",
        name="explain_route",
        summary="Which models a chat would be tried on, and why",
        body=ChatBody,
        handle=explain_route,
        request_schema=reference("RouteRequest"),
        response_schema=reference("Route"),
    )


def _without_choice(asked: str | None, name: str) -> dict[str, Any]:
    return _answer(asked, [name], strategy=None, reason="requested by name; it has no fallback")


def _planned(asked: str | None, plan: Plan) -> dict[str, Any]:
    return {
        **_answer(asked, [attempt.model for attempt in plan.route.attempts], plan.strategy, plan.route.reason),
        "candidates": [*(_candidate(candidate, plan) for candidate in plan.candidates), *_refused(plan.refused)],
        "features": {name: round(value, 4) for name, value in plan.route.features.items()},
        "decision_ms": round(1000 * plan.decision_s, 3),
    }


def _answer(asked: str | None, attempts: list[str], strategy: str | None, reason: str) -> dict[str, Any]:
    return {
        "object": "route",
        "asked": asked,
        "model": attempts[0],
        "attempts": attempts,
        "strategy": strategy,
        "reason": reason,
        "candidates": [],
        "features": {},
        "decision_ms": 0.0,
    }


def _candidate(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    score = plan.route.scores.get(candidate.name)
    return {
        "model": candidate.name,
        "score": None if score is None else round(score, 4),
        "refused": None,
        "state": candidate.state,
        "has_failed": candidate.has_failed,
        "num_running": candidate.num_running,
        "num_waiting": candidate.num_waiting,
        "first_token_ms": None if candidate.first_token_s is None else round(1000 * candidate.first_token_s, 1),
    }


def _refused(refused: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name, reason in refused.items():
        yield {"model": name, "refused": reason}
