"""``/admin/requests`` and ``/admin/slots``: running requests, cancelling one, and each engine's slots and caches."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

import msgspec
from attrs import frozen
from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.generation.assembly import Choice
from enginehouse.api.generation.running_answers import RunningAnswer, find_answer, list_answers
from enginehouse.api.http.body import read_empty_body
from enginehouse.api.http.callers import caller_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import EngineView, Inspectable, Phase, PrefixView, RequestView, SequenceView
from enginehouse.contract.types import ChoiceFinished, GenerateRequest
from enginehouse.recovery import Recovery
from enginehouse.serving import LoadedModel, ModelManager

_PATIENCE_S = 1.0
"""Timeout of a snapshot. An engine takes snapshots between steps, and none during an isolation run; after this time
the model is shown without one.
"""


@frozen(eq=False)
class Engines:
    """The engines of one server."""

    manager: ModelManager
    recovery: Recovery

    def get(self, model: str) -> Engine | None:
        """Return the engine that currently serves ``model``, a model name, or None."""
        loaded = self._loaded(model)
        return loaded.engine if loaded is not None else None

    def _loaded(self, model: str) -> LoadedModel | None:
        try:
            return self.manager.get(model)
        except EnginehouseError:
            return None

    def all(self) -> dict[str, Engine]:
        """Return every engine that is currently serving, by model."""
        return {name: loaded.engine for name, loaded in self._all().items()}

    def _all(self) -> dict[str, LoadedModel]:
        names = [status.name for status in self.manager.statuses() if status.state == "ready"]
        found = {name: self._loaded(name) for name in names}
        return {name: loaded for name, loaded in found.items() if loaded is not None}

    async def views(self, caller: str, wanted: Callable[[str], bool] = lambda model: True) -> dict[str, EngineView]:
        """Return the available snapshots for a caller, by model."""
        models = {name: loaded for name, loaded in self._all().items() if wanted(name)}
        views = await asyncio.gather(*(self._view(loaded, caller) for loaded in models.values()))
        return {name: view for name, view in zip(models, views, strict=True) if view is not None}

    async def _view(self, model: LoadedModel, caller: str) -> EngineView | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.recovery.view(model, caller)
        except (TimeoutError, EnginehouseError):
            return None

    def restarting(self) -> frozenset[str]:
        """Return the models whose worker is restarting."""
        return frozenset(status.name for status in self.manager.statuses() if status.state == "restarting")


def slot_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""
    engines, has_keys = Engines(state.manager, state.pipeline.recovery), state.settings.auth.needs_key

    @get("/admin/slots")
    async def show_slots(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show slots, KV positions and prefix-cache entries of every serving model."""
        serving = engines.all()
        views = await engines.views(caller_of(request.scope).name)
        models = []
        for name, engine in serving.items():
            view = views.get(name)
            shown = _UNKNOWN if view is None else _shown(view, has_keys)
            models.append({"model": name, "inspectable": isinstance(engine, Inspectable), **shown})
        return {"object": "list", "data": models}

    return show_slots


_UNKNOWN = dict.fromkeys(
    ("slots", "slots_in_use", "requests_waiting", "cache_tokens", "free_tokens", "sequences", "prefixes")
)
"""Values shown for an engine that is not inspectable, or is busy with a long step."""


def _shown(view: EngineView, has_keys: bool) -> dict[str, Any]:
    sequences = [
        {
            "request_id": request.request_id,
            "choice": sequence.choice,
            "phase": sequence.phase,
            "kv_tokens": sequence.num_kv_tokens,
            "prompt_tokens": request.usage.prompt_tokens,
            "completion_tokens": sequence.num_completion_tokens,
        }
        for request in view.requests
        for sequence in request.sequences
    ]
    in_use = [sequence for sequence in sequences if sequence["phase"] in ("prefill", "decode")]
    waiting = [
        request for request in view.requests if all(sequence.phase == "queued" for sequence in request.sequences)
    ]
    return {
        "slots": view.num_slots,
        "slots_in_use": len(in_use),
        "requests_waiting": len(waiting),
        "cache_tokens": view.num_cache_tokens,
        "free_tokens": view.num_free_tokens,
        "sequences": sequences,
        "prefixes": [_prefix_entry(prefix, has_keys) for prefix in view.prefixes],
    }


def _prefix_entry(prefix: PrefixView, has_keys: bool) -> dict[str, Any]:
    """Describe a prefix. Namespaces of keys are names; salts are written by clients, so only a hash is shown."""
    name, _, salt = prefix.namespace.partition("\0") if has_keys else (None, "", prefix.namespace)
    return {
        "namespace": name,
        "salt_hash": hashlib.sha256(salt.encode("utf-8", "replace")).hexdigest()[:16] if salt else None,
        "tokens": prefix.num_tokens,
        "hits": prefix.num_hits,
    }


_ORDER: tuple[Phase, ...] = ("decode", "prefill", "paused", "queued")
"""Precedence of phases: a request's phase is the first of these that one of its choices is in."""


def describe_answer(answer: RunningAnswer, views: Mapping[str, EngineView], restarting: Set[str]) -> dict[str, Any]:
    """Return the description of one running request.

    Args:
        views: snapshots of engines, by model.
        restarting: models whose worker has died and has not restarted yet; their requests are paused.
    """
    record, request = answer.record, answer.pooling or answer.requests[0]
    requests = _views_of(answer, views)
    choices = [] if answer.pooling is not None else _choices(answer, requests)
    model = record.model or record.asked_model if answer.pooling is not None else _model_of(answer)
    is_paused = model in restarting
    phases = {choice["phase"] for choice in choices}
    return {
        "id": answer.id,
        "request_id": record.request_id,
        "key": record.key,
        "model": record.model or record.asked_model,
        "endpoint": record.endpoint,
        "phase": "paused" if is_paused else next((phase for phase in _ORDER if phase in phases), "decode"),
        "stream": bool(record.stream),
        "client_gone": answer.exchange.disconnected,
        "priority": request.priority,
        "age_s": round(time.perf_counter() - record.began, 3),
        "first_token_s": None if record.pace.first_s is None else round(record.pace.first_s, 3),
        "prompt_tokens": _num_prompt_tokens(answer),
        "cached_tokens": sum(view.usage.cached_tokens for view in requests.values()) if requests else None,
        "choices": choices,
    }


def describe_partial(answer: RunningAnswer) -> dict[str, Any]:
    """Return the output that a request has generated so far."""
    choices = answer.assembly.choices if answer.assembly is not None else []
    return {"id": answer.id, "choices": [_partial(choice) for choice in choices]}


def _model_of(answer: RunningAnswer) -> str | None:
    """Return the model that generates; None until a worker has accepted every prompt."""
    return answer.assembly.running[0].model.name if answer.assembly is not None else None


def prompts_of(answer: RunningAnswer) -> list[Any]:
    """Return the prompts as the client sent them: messages, text or token ids; the inputs of a pooling request."""
    if answer.pooling is not None:
        return [msgspec.to_builtins(one) for one in answer.pooling.inputs]
    return [_prompt(request) for request in answer.requests]


def _prompt(request: GenerateRequest) -> Any:
    part = next(part for part in (request.messages, request.text, request.token_ids) if part is not None)
    return msgspec.to_builtins(part)


def _partial(choice: Choice) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": "".join(call.arguments)} for call in choice.calls]
    return {
        "index": choice.index,
        "text": choice.text,
        "reasoning": choice.reasoning,
        "tool_calls": calls,
        "finish_reason": choice.finish_reason,
    }


def _views_of(answer: RunningAnswer, views: Mapping[str, EngineView]) -> dict[int, RequestView]:
    """Return the snapshot of each prompt's request, by prompt index."""
    if answer.assembly is None:
        return {}
    by_prompt = {}
    for prompt, running in enumerate(answer.assembly.running):
        view = views.get(running.model.name)
        for request in view.requests if view is not None else ():
            if request.request_id == running.request.request_id:
                by_prompt[prompt] = request
    return by_prompt


def _num_prompt_tokens(answer: RunningAnswer) -> int | None:
    if answer.assembly is None:
        return None
    return sum(running.generation.num_prompt_tokens for running in answer.assembly.running)


def _choices(answer: RunningAnswer, requests: Mapping[int, RequestView]) -> list[dict[str, Any]]:
    """Return one entry per choice of every prompt."""
    num_choices = answer.requests[0].num_choices
    shown = []
    for prompt in range(len(answer.requests)):
        view = requests.get(prompt)
        by_choice = {sequence.choice: sequence for sequence in view.sequences} if view is not None else {}
        for number in range(num_choices):
            shown.append(_choice(answer, prompt * num_choices + number, by_choice.get(number)))
    return shown


def _choice(answer: RunningAnswer, index: int, sequence: SequenceView | None) -> dict[str, Any]:
    assembly = answer.assembly
    ended = assembly.ended.get(index) if assembly is not None else None
    if ended is not None:
        phase: str = "ended"
    elif sequence is not None:
        phase = sequence.phase
    elif assembly is None:
        phase = "queued"
    else:
        phase = "decode" if assembly.choices[index].texts or assembly.choices[index].reasonings else "prefill"
    return {
        "index": index,
        "phase": phase,
        "completion_tokens": _num_completion_tokens(ended, sequence),
        "kv_tokens": sequence.num_kv_tokens if sequence is not None else None,
        "is_thinking": sequence.is_thinking if sequence is not None else None,
        "finish_reason": ended.finish_reason if ended is not None else None,
    }


def _num_completion_tokens(ended: ChoiceFinished | None, sequence: SequenceView | None) -> int | None:
    if ended is not None:
        return ended.usage.completion_tokens
    return sequence.num_completion_tokens if sequence is not None else None


def request_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """Return the routes under ``/admin/requests``."""
    engines, exchanges = Engines(state.manager, state.pipeline.recovery), state.exchanges
    limit = state.settings.limits.max_body_bytes

    async def describe(answers: list[RunningAnswer], request: Request[Any, Any, Any]) -> list[dict[str, Any]]:
        models = {answer.record.model for answer in answers}
        views = await engines.views(caller_of(request.scope).name, models.__contains__)
        return [describe_answer(answer, views, engines.restarting()) for answer in answers]

    @get("/admin/requests")
    async def list_requests(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """List the running generation requests, the oldest first."""
        return {"object": "list", "data": await describe(list_answers(exchanges), request)}

    @get("/admin/requests/{request_id:str}")
    async def show_request(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show one running request."""
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        (shown,) = await describe([answer], request)
        return {**shown, "prompts": prompts_of(answer) if state.settings.server.show_prompts else None}

    @get("/admin/requests/{request_id:str}/partial")
    async def show_partial(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show the output that a running request has generated so far."""
        return describe_partial(find_answer(exchanges, str(request.path_params["request_id"])))

    @post("/admin/requests/{request_id:str}/cancel", status_code=200)
    async def cancel_request(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Cancel a running request; its client gets the error ``request_cancelled``."""
        await read_empty_body(request.receive, limit)
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        answer.cancel()
        return {"id": answer.id, "cancelled": True}

    @post("/admin/requests/{request_id:str}/stop-thinking", status_code=200)
    async def stop_thinking(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Close the reasoning of a running request, so that the final answer follows."""
        await read_empty_body(request.receive, limit)
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        return {"id": answer.id, "choices_stopped": await answer.stop_thinking(engines.get)}

    return [list_requests, show_request, show_partial, cancel_request, stop_thinking]
