"""The admin API and the figures in the OpenAPI document: addresses of operators, which exist once and in one shape."""

from __future__ import annotations

from typing import Any, get_args

from enginehouse.api.openapi.answers import object_of, reference
from enginehouse.api.openapi.fields import JsonSchema
from enginehouse.api.openapi.running import RUNNING_SCHEMAS
from enginehouse.serving import ModelState
from enginehouse.serving.events import EventKind

__all__ = ["ADMIN_SCHEMAS", "admin_paths"]

_ROOT = [{"url": "/"}]
_TEXT: JsonSchema = {"type": "string"}
_TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_NUMBER: JsonSchema = {"type": "integer", "minimum": 1}
_SECONDS_OR_NULL: JsonSchema = {"type": ["number", "null"], "minimum": 0}
_SHARE: JsonSchema = {"type": "number", "minimum": 0, "maximum": 1}
_NAMES: JsonSchema = {"type": "array", "items": _TEXT}
_ANYTHING: JsonSchema = {"type": "object"}

ADMIN_SCHEMAS: dict[str, JsonSchema] = {
    "ServedModel": object_of(
        id=_TEXT,
        object={"const": "model"},
        instance=_NUMBER,
        aliases=_NAMES,
        state={"enum": list(get_args(ModelState))},
        progress=_SHARE,
        progress_text=_TEXT,
        error=_TEXT_OR_NULL,
        backend=_TEXT_OR_NULL,
        backend_reason=_TEXT,
        load={"enum": ["eager", "lazy"]},
        pin={"type": "boolean"},
        ttl=_SECONDS_OR_NULL,
        draining={"enum": ["wait", "serve"]},
        num_running=_COUNT,
        num_waiting=_COUNT,
        num_restarts=_COUNT,
        idle_s=_SECONDS_OR_NULL,
        memory={"anyOf": [object_of(device=_TEXT, bytes=_COUNT), {"type": "null"}]},
    ),
    "ServedModelList": object_of(
        object={"const": "list"},
        data={"type": "array", "items": reference("ServedModel")},
        memory={
            "type": "object",
            "additionalProperties": object_of(
                budget_bytes={"type": ["integer", "null"], "minimum": 0}, held_bytes=_COUNT
            ),
        },
    ),
    "ModelEvent": object_of(
        kind={"enum": list(get_args(EventKind))},
        model=_TEXT,
        instance=_NUMBER,
        progress=_SHARE,
        text=_TEXT,
        at={"type": "number"},
    ),
    "LostEvents": object_of(kind={"const": "lost"}, count=_COUNT),
    **RUNNING_SCHEMAS,
    "Reloaded": object_of(
        generation={"type": "integer", "minimum": 2},
        models=object_of(added=_NAMES, removed=_NAMES, replaced=_NAMES, updated=_NAMES, kept=_NAMES),
        needs_restart=_NAMES,
    ),
}
"""Component name to schema."""

_UNLOAD: JsonSchema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "drain": {"type": "boolean", "description": "Let running requests finish; new ones wait."},
        "force": {"type": "boolean", "description": "End running requests or a load; unload a pinned model."},
        "drain_s": {"type": "number", "minimum": 0, "description": "Seconds that running requests get."},
    },
}
_EMPTY: JsonSchema = {"type": "object", "maxProperties": 0}


def admin_paths() -> dict[str, Any]:
    """Address to operations; all of them need the scope ``admin``, ``/metrics`` needs ``metrics``."""
    model, request = (
        _parameter("model_id", "A name or alias; it may hold slashes."),
        _parameter("request_id", "Its id."),
    )
    paths: dict[str, Any] = {
        "/admin/models": {"get": _get("list_served_models", "List all models with what they hold", "ServedModelList")},
        "/admin/models/{model_id}": {
            **model,
            "get": _get("show_served_model", "Show one model", "ServedModel", (404,)),
        },
        "/admin/models/{model_id}/load": {
            **model,
            "post": _post("load_model", "Load a model and wait for it", "ServedModel", _EMPTY, (404, 409, 503, 507)),
        },
        "/admin/models/{model_id}/unload": {
            **model,
            "post": _post("unload_model", "Unload a model and wait for its end", "ServedModel", _UNLOAD, (404, 409)),
        },
        "/admin/events": {"get": _events()},
        "/admin/reload": {"post": _post("reload_configuration", "Read the configuration again", "Reloaded", _EMPTY)},
        "/admin/requests": {"get": _get("list_requests", "List the requests that are running", "RunningRequestList")},
        "/admin/requests/{request_id}": {
            **request,
            "get": _get("show_request", "Show a running request", "RunningRequest", (400, 404)),
        },
        "/admin/requests/{request_id}/partial": {
            **request,
            "get": _get("show_partial", "Show what a running request has said so far", "PartialAnswer", (400, 404)),
        },
        "/admin/requests/{request_id}/cancel": {
            **request,
            "post": _post("cancel_request", "Cancel a running request", "CancelledRequest", _EMPTY, (404,)),
        },
        "/admin/requests/{request_id}/stop-thinking": {
            **request,
            "post": _post("stop_thinking", "Close the reasoning of a request", "StoppedThinking", _EMPTY, (404, 409)),
        },
        "/admin/slots": {"get": _get("list_slots", "Show slots and KV caches", "ModelSlotsList")},
        "/metrics": {"get": _metrics()},
    }
    return {path: {"servers": _ROOT, **item} for path, item in paths.items()}


def _parameter(name: str, description: str) -> dict[str, Any]:
    schema = {"name": name, "in": "path", "required": True, "schema": _TEXT, "description": description}
    return {"parameters": [schema]}


def _get(name: str, summary: str, answer: str | None = None, refusals: tuple[int, ...] = ()) -> dict[str, Any]:
    schema = _ANYTHING if answer is None else reference(answer)
    return _operation(name, summary, {"application/json": {"schema": schema}}, (401, 403, *refusals))


def _post(
    name: str, summary: str, answer: str | None, body: JsonSchema, refusals: tuple[int, ...] = ()
) -> dict[str, Any]:
    operation = _get(name, summary, answer, (400, 413, 415, *refusals))
    return {**operation, "requestBody": {"content": {"application/json": {"schema": body}}}}


def _events() -> dict[str, Any]:
    schema = {"anyOf": [reference("ModelEvent"), reference("LostEvents")]}
    content = {"text/event-stream": {"schema": _TEXT, "x-event-schema": schema}}
    return _operation("stream_events", "Stream what happens to models", content, (401, 403))


def _metrics() -> dict[str, Any]:
    return _operation("show_metrics", "Figures for Prometheus", {"text/plain": {"schema": _TEXT}}, (401, 403))


def _operation(name: str, summary: str, content: dict[str, Any], refusals: tuple[int, ...]) -> dict[str, Any]:
    responses = {"200": {"description": "The answer.", "content": content}}
    refused = {str(status): {"$ref": f"#/components/responses/{status}"} for status in refusals}
    return {"operationId": name, "summary": summary, "responses": {**responses, **refused}}
