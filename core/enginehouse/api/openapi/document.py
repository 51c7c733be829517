"""The complete document: paths, requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.api.http.headers import RATE_HEADERS
from enginehouse.api.openapi.admin import ADMIN_SCHEMAS, admin_paths
from enginehouse.api.openapi.answers import ANSWER_SCHEMAS, reference
from enginehouse.api.openapi.examples import REQUEST_EXAMPLES
from enginehouse.api.openapi.fields import JsonSchema
from enginehouse.api.openapi.requests import request_schemas
from enginehouse.contract.rows import RequestField
from enginehouse.pipeline.model_card import release
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.profiles import PROFILES

__all__ = ["build_document"]

_DESCRIPTION = f"""\
One OpenAI-compatible contract over any inference backend. Every field of a request is applied, refused with a 400 that
names it, or listed in the header `X-Enginehouse-Ignored`; null means absent. Every address but `/health` and `/schema`
exists with and without `/v1`, and as `/compat/<profile>/v1/...` in the profiles {", ".join(PROFILES)}: their
defaults, names and shapes differ, what can be asked does not."""

_ROOT = [{"url": "/"}]

# Status to description, for operations that read a body.
_REFUSALS = {
    400: "The request is malformed, or asks for what cannot be done.",
    401: "Keys are configured, and none of them was given.",
    403: "The host, the origin or the scope of the key is not allowed.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The caller has used up a limit, or fills the queue.",
    500: "This request failed inside the server.",
    503: "The model is not ready or has too much to do, or the server stops.",
}
_EXAMPLES_OF_ERRORS: dict[int, tuple[str, str | None, str, str]] = {
    400: ("temperature: must be <= 2: 3.0", "temperature", "invalid_request_error", "invalid_value"),
    401: ("A valid API key is needed.", None, "invalid_request_error", "invalid_api_key"),
    403: ("Web pages of that origin may not call this server.", None, "invalid_request_error", "origin_not_allowed"),
    404: ("The model 'x' does not exist on this server.", "model", "invalid_request_error", "model_not_found"),
    413: ("The request body is too long.", None, "invalid_request_error", "body_too_large"),
    415: ("The request body must be JSON in UTF-8.", None, "invalid_request_error", "unsupported_media_type"),
    429: ("The queue of this model is full.", None, "overloaded_error", "queue_full"),
    500: ("Sampling failed.", None, "server_error", "generation_failed"),
    503: ("The model is loading.", None, "server_error", "model_not_ready"),
    409: ("The model 'x' is pinned; use force to unload it all the same.", None, "invalid_request_error", "conflict"),
    504: ("The answer did not begin within 60 s.", None, "timeout_error", "first_token_timeout"),
    507: ("The model 'x' needs 9.0 GiB of memory.", None, "server_error", "model_too_large"),
}
# Of generation paths only.
_TIMEOUTS = {504: "The answer did not begin, or did not end, in the time that it may take."}
# Of admin paths only.
_CONFLICTS = {
    409: "What is going on, or the model's settings, contradict the order.",
    507: "The model needs more memory than there may ever be for it.",
}
_RETRIES = (429, 503)
_DETAILS = {
    "name": "X-Enginehouse-Details",
    "in": "header",
    "description": "Whether the answer has the member `enginehouse`.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}


def build_document(
    plugin_fields: Mapping[str, RequestField], limits: LimitsSettings, root_path: str = ""
) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document as plain data.

    Args:
        plugin_fields: fields of plugins, by name; they are included with those of core.
        limits: limits of this server.
        root_path: path prefix under which a proxy exposes this server.
    """
    document = _document(plugin_fields, limits)
    for holder in (document, *document["paths"].values()):
        if "servers" in holder:
            urls = [root_path + server["url"] for server in holder["servers"]]
            holder["servers"] = [{"url": url.rstrip("/") or "/"} for url in urls]
    return document


def _document(plugin_fields: Mapping[str, RequestField], limits: LimitsSettings) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Enginehouse", "version": release(), "description": _DESCRIPTION},
        "servers": [{"url": "/v1"}, {"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            **_keep_within(limits, {**_generating_paths(), **_token_paths()}),
            **_model_paths(),
            **_server_paths(),
            **admin_paths(),
        },
        "components": {
            "schemas": {**request_schemas(plugin_fields, limits), **ANSWER_SCHEMAS, **ADMIN_SCHEMAS},
            "responses": {str(status): _error_response(status) for status in _EXAMPLES_OF_ERRORS},
            "parameters": {"Details": _DETAILS},
            "headers": {
                "Ignored": _header("Fields of the request that had no effect."),
                "Unsupported": _header("Known fields that cannot be honoured, where the server reports these."),
                "RequestId": _header("The id of the request, as in the log."),
                "Rate": _header("A rate that holds for the caller: its limit, what is left, and when all of it is."),
                "RetryAfter": {"description": "Seconds.", "schema": {"type": "integer"}},
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _generating_paths() -> dict[str, Any]:
    return {
        "/chat/completions": _post(
            "create_chat_completion",
            "Continue a chat",
            "ChatCompletionRequest",
            "ChatCompletion",
            "ChatCompletionChunk",
        ),
        "/completions": _post(
            "create_completion", "Continue texts", "CompletionRequest", "Completion", "CompletionChunk"
        ),
    }


def _token_paths() -> dict[str, Any]:
    return {
        "/route": _post("explain_route", "Which models a chat would be tried on, and why", "RouteRequest", "Route"),
        "/tokenize": _post("tokenize", "Token ids of a text or a chat", "TokenizeRequest", "Tokens"),
        "/detokenize": _post("detokenize", "The text of token ids", "DetokenizeRequest", "DetokenizedText"),
        "/apply-template": _post(
            "apply_template", "The prompt that a chat makes", "ApplyTemplateRequest", "RenderedPrompt"
        ),
    }


def _model_paths() -> dict[str, Any]:
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/models": {"get": _operation("list_models", "List all models", _json("ModelList"), (401, 403))},
        "/models/{model_id}": {
            "parameters": [{**model_id, "description": "A name or alias; it may hold slashes."}],
            "get": _operation("show_model", "Show one model", _json("Model"), (401, 403, 404)),
        },
    }


def _server_paths() -> dict[str, Any]:
    health = _operation("check_health", "Whether requests can be served now", _json("Health"), (403,))
    health["responses"]["503"] = {"description": "Not now.", "content": _json("Health")}
    health["security"] = []
    schema = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/health": {"servers": _ROOT, "get": health},
        "/schema": {"servers": _ROOT, "get": _operation("show_schema", "This document", schema, (401, 403))},
    }


def _post(name: str, summary: str, request: str, answer: str, chunk: str | None = None) -> dict[str, Any]:
    """Return a path with one operation that reads a body; ``chunk`` is given if it can be streamed."""
    content = _json(answer) if chunk is None else {**_json(answer), **_events(chunk)}
    generates = chunk is not None
    operation = _operation(name, summary, content, (*_REFUSALS, *_TIMEOUTS) if generates else tuple(_REFUSALS))
    headers = {"x-enginehouse-ignored": "Ignored", "x-enginehouse-unsupported": "Unsupported"}
    if chunk is not None:
        headers |= {"x-request-id": "RequestId", **dict.fromkeys(RATE_HEADERS, "Rate")}
        operation["parameters"] = [{"$ref": "#/components/parameters/Details"}]
    operation["responses"]["200"]["headers"] = {
        name: {"$ref": f"#/components/headers/{component}"} for name, component in headers.items()
    }
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": reference(request), "examples": _examples(request)}},
    }
    return {"post": operation}


def _examples(request: str) -> dict[str, Any]:
    return {title: {"value": dict(body)} for title, body in REQUEST_EXAMPLES[request].items()}


def _keep_within(limits: LimitsSettings, paths: dict[str, Any]) -> dict[str, Any]:
    """Adapt the examples to the limits of this server."""
    most = {"max_tokens": limits.max_tokens, "n": limits.max_choices, "best_of": limits.max_choices}
    for item in paths.values():
        for example in item["post"]["requestBody"]["content"]["application/json"]["examples"].values():
            body = example["value"]
            body.update({name: min(body[name], limit) for name, limit in most.items() if limit and name in body})
    return paths


def _operation(name: str, summary: str, content: dict[str, Any], refusals: tuple[int, ...]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in refusals},
        },
    }


def _json(component: str) -> dict[str, Any]:
    return {"application/json": {"schema": reference(component)}}


def _events(chunk: str) -> dict[str, Any]:
    """Return the description of a stream. OpenAPI 3.1 has no event schemas, so they are in an extension field."""
    description = (
        f"Events `data: <{chunk}>`, at the end `data: [DONE]`; or `data: <Error>` where the answer breaks off."
    )
    return {
        "text/event-stream": {
            "schema": {"type": "string", "description": description},
            "x-event-schema": {"anyOf": [reference(chunk), reference("Error")]},
        }
    }


def _error_response(status: int) -> dict[str, Any]:
    message, param, kind, code = _EXAMPLES_OF_ERRORS[status]
    example = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    response: dict[str, Any] = {
        "description": {**_REFUSALS, **_TIMEOUTS, **_CONFLICTS}[status],
        "content": {"application/json": {"schema": reference("Error"), "example": example}},
    }
    if status in _RETRIES:
        response["headers"] = {"retry-after": {"$ref": "#/components/headers/RetryAfter"}}
    return response


def _header(description: str) -> JsonSchema:
    return {"description": description, "schema": {"type": "string"}}
