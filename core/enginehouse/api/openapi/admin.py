"""The admin API, running requests and slots in the OpenAPI document."""

from __future__ import annotations

from typing import Any, get_args

from enginehouse.api.openapi.answers import object_of, reference
from enginehouse.contract.inspection import Phase
from enginehouse.contract.rows import JsonSchema
from enginehouse.serving import ModelState
from enginehouse.serving.lifecycle import EventKind

_TEXT: JsonSchema = {"type": "string"}
_TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: JsonSchema = {"type": ["integer", "null"], "minimum": 0}
_SECONDS: JsonSchema = {"type": "number", "minimum": 0}
_SECONDS_OR_NULL: JsonSchema = {"type": ["number", "null"], "minimum": 0}
_FINISH: JsonSchema = {"enum": ["stop", "length", "tool_calls", "content_filter", None]}


def _list_of(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _many(items: JsonSchema) -> JsonSchema:
    """Return the schema of OpenAI's list object."""
    return object_of(object={"const": "list"}, data=_list_of(items))


_CHOICE = object_of(
    index=_COUNT,
    phase={"enum": [*get_args(Phase), "ended"]},
    completion_tokens=_COUNT_OR_NULL,
    kv_tokens=_COUNT_OR_NULL,
    is_thinking={"type": ["boolean", "null"]},
    finish_reason=_FINISH,
)
_SEQUENCE = object_of(
    request_id=_TEXT,
    choice=_COUNT,
    phase={"enum": list(get_args(Phase))},
    kv_tokens=_COUNT,
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
)
_PREFIX = object_of(namespace=_TEXT_OR_NULL, salt_hash=_TEXT_OR_NULL, tokens=_COUNT, hits=_COUNT)
_NULLABLE_LIST = {"type": ["array", "null"]}

RUNNING_SCHEMAS: dict[str, JsonSchema] = {
    "RunningRequest": object_of(
        {"prompts": {"type": ["array", "null"], "description": "Null unless the settings allow showing them."}},
        id=_TEXT,
        request_id=_TEXT,
        key=_TEXT_OR_NULL,
        model=_TEXT_OR_NULL,
        endpoint=_TEXT,
        phase={"enum": list(get_args(Phase))},
        stream={"type": "boolean"},
        client_gone={"type": "boolean"},
        priority={"type": "integer"},
        age_s=_SECONDS,
        first_token_s=_SECONDS_OR_NULL,
        prompt_tokens=_COUNT_OR_NULL,
        cached_tokens=_COUNT_OR_NULL,
        choices=_list_of(_CHOICE),
    ),
    "RunningRequestList": _many(reference("RunningRequest")),
    "PartialAnswer": object_of(
        id=_TEXT,
        choices=_list_of(
            object_of(
                index=_COUNT,
                text=_TEXT,
                reasoning=_TEXT,
                tool_calls=_list_of(object_of(name=_TEXT, arguments=_TEXT)),
                finish_reason=_FINISH,
            )
        ),
    ),
    "CancelledRequest": object_of(id=_TEXT, cancelled={"const": True}),
    "StoppedThinking": object_of(id=_TEXT, choices_stopped={"type": "integer", "minimum": 1}),
    "ModelSlots": object_of(
        model=_TEXT,
        inspectable={"type": "boolean", "description": "True if the engine reports its slots and caches."},
        slots=_COUNT_OR_NULL,
        slots_in_use=_COUNT_OR_NULL,
        requests_waiting=_COUNT_OR_NULL,
        cache_tokens=_COUNT_OR_NULL,
        free_tokens=_COUNT_OR_NULL,
        sequences={**_NULLABLE_LIST, "items": _SEQUENCE},
        prefixes={**_NULLABLE_LIST, "items": _PREFIX},
    ),
    "ModelSlotsList": _many(reference("ModelSlots")),
}
"""Component name to schema."""


_ROOT = [{"url": "/"}]
_NUMBER: JsonSchema = {"type": "integer", "minimum": 1}
_SHARE: JsonSchema = {"type": "number", "minimum": 0, "maximum": 1}
_NAMES: JsonSchema = {"type": "array", "items": _TEXT}
_ANYTHING: JsonSchema = {"type": "object"}

_ADD_ADAPTER: JsonSchema = {
    "type": "object",
    "required": ["name", "source"],
    "properties": {"name": _TEXT, "source": _TEXT, "scale": {"type": "number", "default": 1.0}},
    "additionalProperties": False,
}
_VLLM_UNLOAD: JsonSchema = {
    "type": "object",
    "required": ["lora_name"],
    "properties": {"lora_name": _TEXT, "base_model_name": _TEXT_OR_NULL},
}
_VLLM_LOAD: JsonSchema = {
    **_VLLM_UNLOAD,
    "required": ["lora_name", "lora_path"],
    "properties": {"lora_name": _TEXT, "lora_path": _TEXT, "base_model_name": _TEXT_OR_NULL},
}

ADMIN_SCHEMAS: dict[str, JsonSchema] = {
    "AdapterList": object_of(
        object={"const": "list"},
        data=_list_of(
            object_of(
                id=_COUNT,
                name=_TEXT,
                model=_TEXT,
                scale={"type": "number"},
                digest=_TEXT_OR_NULL,
                origin={"enum": ["settings", "request"]},
            )
        ),
        max_adapters={"type": "integer", "minimum": 1},
    ),
    "ServedModel": object_of(
        id=_TEXT,
        object={"const": "model"},
        instance=_NUMBER,
        aliases=_NAMES,
        state={"enum": list(get_args(ModelState))},
        progress=_SHARE,
        progress_text=_TEXT,
        error=_TEXT_OR_NULL,
        downloading={"type": "boolean", "description": "Its files are being downloaded; progress is that of it."},
        origin={"enum": ["settings", "folder", "added"]},
        source=_TEXT,
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
        replicas={
            "anyOf": [_list_of(object_of(name=_TEXT, num_requests=_COUNT)), {"type": "null"}],
            "description": "Its workers on other machines; null for a model on this one.",
        },
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
        unserved={
            **_list_of(object_of(path=_TEXT, reason=_TEXT)),
            "description": "Files in server.models_dir that are not served.",
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
    "RequestEvent": object_of(
        kind={"enum": ["request_began", "request_ended"]},
        id=_TEXT_OR_NULL,
        request_id=_TEXT_OR_NULL,
        key=_TEXT_OR_NULL,
        endpoint=_TEXT_OR_NULL,
        model=_TEXT_OR_NULL,
        asked_model=_TEXT_OR_NULL,
        stream={"type": ["boolean", "null"]},
        status=_COUNT_OR_NULL,
        outcome=_TEXT_OR_NULL,
        finish_reasons=_NAMES,
        first_token_s=_SECONDS_OR_NULL,
        total_s=_SECONDS_OR_NULL,
        usage={"type": "object", "additionalProperties": {"type": "number"}},
        at={"type": "number"},
    ),
    "RemovedModel": object_of(id=_TEXT, object={"const": "model"}, deleted={"const": True}),
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
_ADD: JsonSchema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["source"],
    "properties": {
        "source": {
            "type": "string",
            "minLength": 1,
            "maxLength": 1000,
            "description": "A path in server.models_dir, or an id that server.allowed_sources allows.",
        },
        "id": {"type": ["string", "null"], "description": "The name; unset is the source's own."},
        "download": {"type": "boolean", "description": "Begin with downloading its files if they are missing."},
        "aliases": _NAMES,
        "context": {"type": ["integer", "null"], "minimum": 1},
        "slots": {"type": ["integer", "null"], "minimum": 1},
        "load": {"enum": ["eager", "lazy"], "default": "lazy"},
        "pin": {"type": ["boolean", "null"]},
        "ttl": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "draining": {"enum": ["wait", "serve", None]},
        "defaults": {"type": ["object", "null"], "description": "Default values of request fields."},
    },
}
_EMPTY: JsonSchema = {"type": "object", "maxProperties": 0}


def admin_paths() -> dict[str, Any]:
    """Return path to operations; all require the scope ``admin``, ``/metrics`` the scope ``metrics``."""
    model, request = (
        _parameter("model_id", "A name or alias; it may hold slashes."),
        _parameter("request_id", "Its id."),
    )
    paths: dict[str, Any] = {
        "/admin/models": {
            "get": _get("list_served_models", "List all models with what they hold", "ServedModelList"),
            "post": _post("add_model", "Serve a further model", "ServedModel", _ADD, (404, 409, 507), status=201),
        },
        "/admin/models/{model_id}": {
            **model,
            "get": _get("show_served_model", "Show one model", "ServedModel", (404,)),
            "delete": _get("remove_model", "Stop serving a model that was added", "RemovedModel", (404, 409)),
        },
        "/admin/models/{model_id}/download": {
            **model,
            "post": _post("download_model", "Begin to download its files", "ServedModel", _EMPTY, (404, 409)),
        },
        "/admin/models/{model_id}/cancel-download": {
            **model,
            "post": _post("cancel_download", "Stop the download of its files", "ServedModel", _EMPTY, (404, 409)),
        },
        "/admin/models/{model_id}/load": {
            **model,
            "post": _post("load_model", "Load a model and wait for it", "ServedModel", _EMPTY, (404, 409, 503, 507)),
        },
        "/admin/models/{model_id}/unload": {
            **model,
            "post": _post("unload_model", "Unload a model and wait for its end", "ServedModel", _UNLOAD, (404, 409)),
        },
        **_adapter_paths(model),
        "/admin/events": {"get": _events()},
        "/admin/reload": {"post": _post("reload_configuration", "Read the configuration again", "Reloaded", _EMPTY)},
        "/admin/requests": {"get": _get("list_requests", "List the requests that are running", "RunningRequestList")},
        "/admin/requests/{request_id}": {
            **request,
            "get": _get("show_request", "Show a running request", "RunningRequest", (400, 404)),
        },
        "/admin/requests/{request_id}/partial": {
            **request,
            "get": _get("show_partial", "Show the text of a running request so far", "PartialAnswer", (400, 404)),
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


def _adapter_paths(model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "/admin/models/{model_id}/adapters": {
            **model,
            "get": _get("list_adapters", "List the adapters of a model", "AdapterList", (404,)),
            "post": _post("add_adapter", "Load an adapter and offer it", "AdapterList", _ADD_ADAPTER, (404, 409)),
        },
        "/admin/models/{model_id}/adapters/{adapter}": {
            "parameters": [*model["parameters"], *_parameter("adapter", "Name of the adapter.")["parameters"]],
            "delete": _get("remove_adapter", "Offer an adapter no longer", "AdapterList", (404,)),
        },
        "/v1/load_lora_adapter": {"post": _text_post("load_lora_adapter", "Add an adapter, as vLLM does", _VLLM_LOAD)},
        "/v1/unload_lora_adapter": {
            "post": _text_post("unload_lora_adapter", "Remove an adapter, as vLLM does", _VLLM_UNLOAD)
        },
    }


def _parameter(name: str, description: str) -> dict[str, Any]:
    schema = {"name": name, "in": "path", "required": True, "schema": _TEXT, "description": description}
    return {"parameters": [schema]}


def _get(name: str, summary: str, answer: str | None = None, refusals: tuple[int, ...] = ()) -> dict[str, Any]:
    schema = _ANYTHING if answer is None else reference(answer)
    return _operation(name, summary, {"application/json": {"schema": schema}}, (401, 403, *refusals))


def _post(
    name: str, summary: str, answer: str | None, body: JsonSchema, refusals: tuple[int, ...] = (), *, status: int = 200
) -> dict[str, Any]:
    operation = _get(name, summary, answer, (400, 413, 415, *refusals))
    operation["responses"][str(status)] = operation["responses"].pop("200")
    return {**operation, "requestBody": {"content": {"application/json": {"schema": body}}}}


def _text_post(name: str, summary: str, body: JsonSchema) -> dict[str, Any]:
    operation = _operation(name, summary, {"text/plain": {"schema": _TEXT}}, (400, 401, 403, 404, 409, 413, 415))
    return {**operation, "requestBody": {"content": {"application/json": {"schema": body}}}}


def _events() -> dict[str, Any]:
    schema = {"anyOf": [reference("ModelEvent"), reference("RequestEvent"), reference("LostEvents")]}
    content = {"text/event-stream": {"schema": _TEXT, "x-event-schema": schema}}
    return _operation("stream_events", "Stream the events of models and requests", content, (401, 403))


def _metrics() -> dict[str, Any]:
    return _operation("show_metrics", "Figures for Prometheus", {"text/plain": {"schema": _TEXT}}, (401, 403))


def _operation(name: str, summary: str, content: dict[str, Any], refusals: tuple[int, ...]) -> dict[str, Any]:
    responses = {"200": {"description": "The answer.", "content": content}}
    refused = {str(status): {"$ref": f"#/components/responses/{status}"} for status in refusals}
    return {"operationId": name, "summary": summary, "responses": {**responses, **refused}}
