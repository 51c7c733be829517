"""Routes about models: ``GET /v1/models``, ``GET /v1/models/{id}``, and ``POST /v1/route``.

The last one returns the models that a chat would be tried on, with reasons, without generating anything. For it, long
prompts are tokenized by the loaded models whose context may be too small for them.

The list has the long form, with parameters and capabilities, only with ``?details=true``: it takes some kilobytes per
model. Loading and failed models are listed too; values that are known only for an open model are null for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import evolve

from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.details import shown_parameters
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.http.callers import check_model, check_priority, may_use, shown_as
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.errors import InvalidRequest, ModelNotFound, quoted
from enginehouse.contract.refusals import refused_fields
from enginehouse.contract.router import Candidate
from enginehouse.contract.surface import Reply, ReplyRoute, Route
from enginehouse.pipeline.capabilities import Capability
from enginehouse.pipeline.model_profile import ModelProfile
from enginehouse.pipeline.routing import AUTO, Plan
from enginehouse.serving import ModelStatus
from enginehouse.serving.background import run_in_thread


def model_routes(state: ApiState) -> list[Route]:
    """Return the routes, without a prefix."""

    async def list_models(call: DecodedCall[Any]) -> Reply:
        is_long = _asks_for_details(call)
        models = _models(state, call.server, is_long=is_long)
        behind_auto = _behind_auto(state, models)
        routed = [_routed(behind_auto, is_long=is_long)] if behind_auto else []
        return Reply({"object": "list", "data": models + routed})

    async def show_model(call: DecodedCall[Any]) -> Reply:
        name = call.path["model_id"]
        if state.pipeline.is_routed(name):
            if behind_auto := _behind_auto(state, _models(state, call.server)):
                return Reply(_routed(behind_auto, is_long=True))
            raise ModelNotFound(name)
        status, names = call.server.status(name)
        if state.manager.adapter_in(name) is not None:
            return Reply(_adapted(status, name, call.server) | _details(state, status, name, call.server))
        return Reply(_model(status, names, call.server) | _details(state, status, name, call.server))

    return [
        ReplyRoute(
            method="GET",
            path="/models",
            name="list_models",
            summary="List all models",
            handle=list_models,
            limits=None,
            response_schema=reference("ModelList"),
        ),
        ReplyRoute(
            method="GET",
            path="/models/{model_id:path}",
            name="show_model",
            summary="Show one model",
            handle=show_model,
            limits=None,
            response_schema=reference("Model"),
        ),
    ]


def all_capabilities(model_profile: ModelProfile) -> dict[str, Capability]:
    """Return the handling of every known parameter, including those that no model of this server supports."""
    refused = refused_fields(model_profile.capabilities)
    everything = {
        **model_profile.capabilities,
        **{name: Capability("refused", reason) for name, reason in refused.items()},
    }
    return dict(sorted(everything.items()))


def _asks_for_details(call: DecodedCall[Any]) -> bool:
    """Return True for ``?details=true``. Raises InvalidRequest for a value that is neither true nor false."""
    value = call.query.get("details", "false")
    if value not in ("true", "false"):
        raise InvalidRequest(f"details: must be true or false, not {quoted(value)}", "details")
    return value == "true"


def _models(state: ApiState, server: ServerAccess, *, is_long: bool = False) -> list[dict[str, Any]]:
    """Return every model that the caller may use."""
    models: list[dict[str, Any]] = []
    for status in state.manager.statuses():
        if names := shown_as(server.caller, status):
            details = _details(state, status, names[0], server) if is_long else {}
            models.append(_model(status, names, server) | details)
        named = [f"{status.name}:{adapter}" for adapter in status.adapters]
        models += [_adapted(status, name, server) for name in named if may_use(server.caller, status.name, name)]
    return models


def _adapted(status: ModelStatus, name: str, server: ServerAccess) -> dict[str, Any]:
    """Return the model object of an adapter: that of its model, which is the parent."""
    return _model(status, [name], server) | {"parent": status.name}


def _model(status: ModelStatus, names: Sequence[str], server: ServerAccess) -> dict[str, Any]:
    """Return OpenAI's model object; members after ``owned_by`` are ours. Its id is the first of ``names``."""
    info = status.info
    return {
        "id": names[0],
        "object": "model",
        "created": status.created,
        "owned_by": "enginehouse",
        "aliases": list(names[1:]),
        "parent": None,
        "state": status.state,
        "progress": status.progress,
        "error": server.shown_error(status),
        "backend": status.backend,
        "num_restarts": status.num_restarts,
        "max_context": info.max_context if info else None,
        "task": info.task if info else None,
        "input_modalities": ["text", *info.engine.media] if info else None,
    }


def _behind_auto(state: ApiState, models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of a caller's models that a router may choose; none if the settings configure no router.

    Without a configured router ``auto`` is still served, but not listed.
    """
    router = state.settings.router
    if router.strategy is None or not state.pipeline.is_routed(AUTO):
        return []
    meant = router.models or state.settings.models
    return [model for model in models if model["id"] in meant]


def _routed(models: Sequence[dict[str, Any]], *, is_long: bool) -> dict[str, Any]:
    """Return the entry of the router's model name, with the best state and context of its models."""
    ready = any(model["state"] == "ready" for model in models)
    return {
        "id": AUTO,
        "object": "model",
        "created": min(model["created"] for model in models),
        "owned_by": "enginehouse",
        "aliases": [],
        "state": "ready" if ready else models[0]["state"],
        "progress": 1.0 if ready else models[0]["progress"],
        "error": None,
        "backend": None,
        "num_restarts": 0,
        "parent": None,
        "max_context": max((model["max_context"] for model in models if model["max_context"]), default=None),
        "task": "generate",
        "input_modalities": sorted(
            {kind for model in models for kind in model["input_modalities"] or ()}, reverse=True
        ),
        **(_UNKNOWN if is_long else {}),
    }


_UNKNOWN = dict.fromkeys(
    (
        "pooling",
        "quantization",
        "template_hash",
        "system_fingerprint",
        "parsers",
        "parameters",
        "capabilities",
        "metadata",
        "media",
    )
)


def _details(state: ApiState, status: ModelStatus, asked: str, server: ServerAccess) -> dict[str, Any]:
    """Return the members known once the model is open; defaults are those of requests by the name ``asked``.

    Those about texts that are generated are null for other tasks.
    """
    info = status.info
    if info is None:
        return _UNKNOWN
    model_profile = state.pipeline.model_profile(status.name, info)
    described = {
        "pooling": msgspec.to_builtins(info.pooling),
        "quantization": model_profile.quantization,
        "system_fingerprint": model_profile.fingerprint,
        "metadata": info.metadata,
        "media": list(info.engine.media),
    }
    if info.task != "generate":
        return {**_UNKNOWN, **described}
    defaults = state.pipeline.defaults(asked, status.name, info, server.caller.profile.name)
    parameters = shown_parameters(defaults, state.registry.request_fields.values())
    if parameters["seed"]["origin"] == "drawn":
        parameters["seed"]["value"] = None  # differs per request
    return {
        **described,
        "template_hash": model_profile.template_hash,
        "parsers": {"tools": model_profile.formats.tool_parser, "reasoning": model_profile.formats.reasoning_parser},
        "parameters": dict(sorted(parameters.items())),
        "capabilities": {
            name: {"support": one.support, "reason": one.reason}
            for name, one in all_capabilities(model_profile).items()
        },
    }


def route_route(state: ApiState) -> Route:
    """Return the route, without a prefix. Its body is that of a chat; ``model`` is optional."""

    async def explain_route(call: DecodedCall[ChatBody]) -> Reply:
        asked = call.body.model or (AUTO if state.pipeline.is_routed(AUTO) else None)
        if not state.pipeline.is_routed(asked):
            check_model(call.caller, asked, state.manager)
        check_priority(call.caller, call.body.priority)
        chat = await run_in_thread(call.is_large, lambda: call.identify(call.body.request("", **call.body.chat())))
        plan, left_out = await state.pipeline.plan(evolve(chat, model=asked))
        shown = _without_choice(asked, state.manager.find(asked).name) if plan is None else _planned(asked, plan)
        call.unsupported.extend(left_out)
        return Reply(shown)

    return ReplyRoute(
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
