"""The OpenAPI document: paths, requests and responses; ``GET /schema`` returns it as JSON.

Replaces Litestar's OpenAPI generation, which reads the types in the signatures of handlers: ours take bytes, and their
fields are rows of tables, to which plugins add. It has no page to browse it: those that Litestar offers load their
code from other servers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.http.access import RATE_HEADERS
from enginehouse.api.http.frames import encode_json
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.api.openai.tokens import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from enginehouse.api.openapi.admin import ADMIN_SCHEMAS, admin_paths
from enginehouse.api.openapi.answers import ANSWER_SCHEMAS, reference
from enginehouse.api.openapi.examples import REQUEST_EXAMPLES
from enginehouse.api.openapi.fields import ClassSchemas
from enginehouse.contract.rows import JsonSchema, RequestField, classes_of
from enginehouse.contract.surface import GenerationRoute, Route
from enginehouse.pipeline.model_profile import release
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.profiles import PROFILES


def request_schemas(plugin_fields: Mapping[str, RequestField], limits: LimitsSettings) -> dict[str, JsonSchema]:
    """Return component name to schema for every request body and its parts. Plugins add their fields."""
    schemas = ClassSchemas(limits)
    bodies = {
        "ChatCompletionRequest": schemas.object_schema(ChatBody),
        "CompletionRequest": schemas.object_schema(CompletionBody),
        "RouteRequest": schemas.object_schema(ChatBody),
        "CompressRequest": schemas.object_schema(ChatBody),
        "TokenizeRequest": schemas.object_schema(TokenizeBody),
        "DetokenizeRequest": schemas.object_schema(DetokenizeBody),
        "ApplyTemplateRequest": schemas.object_schema(ApplyTemplateBody),
    }
    for name, fields_class in classes_of(plugin_fields.values()).items():
        declared = schemas.object_schema(fields_class)["properties"]
        for field_schema in declared.values():
            field_schema["x-plugin"] = name
        for body in ("ChatCompletionRequest", "CompletionRequest", "RouteRequest", "CompressRequest"):
            bodies[body]["properties"] |= declared
    for body in ("ChatCompletionRequest", "RouteRequest", "CompressRequest"):
        bodies[body]["oneOf"] = [{"required": ["messages"]}, {"required": ["prompt"]}]
    bodies["TokenizeRequest"]["oneOf"] = [{"required": [name]} for name in ("content", "prompt", "messages")]
    bodies["ApplyTemplateRequest"]["required"] = ["messages"]
    for body_class, body in ((TokenizeBody, "TokenizeRequest"), (ApplyTemplateBody, "ApplyTemplateRequest")):
        _keep_effective(body_class, bodies[body])
    return {**schemas.components, **bodies}


def _keep_effective(body_class: type[ChatBody], schema: JsonSchema) -> None:
    """Remove fields that are accepted but have no effect."""
    names = [attribute.name for attribute in attrs.fields(body_class)]
    for name in body_class.find_ignored(dict.fromkeys(names) | {"details": True}):
        schema["properties"].pop(name, None)


_DESCRIPTION = f"""\
One OpenAI-compatible contract over any inference backend. Every field of a request is applied, refused with a 400 that
names it, or listed in the header `X-Enginehouse-Ignored`; null means absent. Every address but `/health` and `/schema`
exists with and without `/v1`, and as `/compat/<profile>/v1/...` in the profiles {", ".join(PROFILES)}: their
defaults, names and shapes differ, what can be asked does not."""

_ROOT = [{"url": "/"}]

# Status to description, for operations that read a body.
_REFUSALS = {
    400: "The request is malformed or cannot be honoured.",
    401: "API keys are configured, and the request has no valid one.",
    403: "The host, the origin or the scope of the key is not allowed.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The caller has used up a limit, or fills the queue.",
    500: "This request failed inside the server.",
    503: "The model is not ready or overloaded, or the server is shutting down.",
}
_EXAMPLES_OF_ERRORS: dict[int, tuple[str, str | None, str, str]] = {
    400: ("temperature: must be <= 2: 3.0", "temperature", "invalid_request_error", "invalid_value"),
    401: ("A valid API key is needed.", None, "invalid_request_error", "invalid_api_key"),
    403: ("Web pages of that origin may not call this server.", None, "invalid_request_error", "origin_not_allowed"),
    404: (
        "The model 'x' does not exist on this server; its models are listed at /v1/models.",
        "model",
        "invalid_request_error",
        "model_not_found",
    ),
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
_TIMEOUTS = {504: "The answer exceeded a time limit."}
# Of admin paths only.
_CONFLICTS = {
    409: "The state or the settings of the model do not allow the command.",
    507: "The model needs more memory than the budget allows.",
}
_RETRIES = (429, 503)
_DETAILS = {
    "name": "X-Enginehouse-Details",
    "in": "header",
    "description": "Whether the answer has the member `enginehouse`.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}


def build_document(
    routes: Sequence[Route], plugin_fields: Mapping[str, RequestField], limits: LimitsSettings, root_path: str = ""
) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document as plain data.

    Args:
        routes: those of all surfaces.
        plugin_fields: fields of plugins, by name; they are included with those of core.
        limits: limits of this server.
        root_path: path prefix under which a proxy exposes this server.
    """
    document = _document(routes, plugin_fields, limits)
    for holder in (document, *document["paths"].values()):
        if "servers" in holder:
            urls = [root_path + server["url"] for server in holder["servers"]]
            holder["servers"] = [{"url": url.rstrip("/") or "/"} for url in urls]
    return document


def _document(
    routes: Sequence[Route], plugin_fields: Mapping[str, RequestField], limits: LimitsSettings
) -> dict[str, Any]:
    of_plugins: dict[str, JsonSchema] = {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Enginehouse", "version": release(), "description": _DESCRIPTION},
        "servers": [{"url": "/v1"}, {"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {
            **_surface_paths(routes, limits, of_plugins),
            **_server_paths(),
            **admin_paths(),
        },
        "components": {
            "schemas": {**of_plugins, **request_schemas(plugin_fields, limits), **ANSWER_SCHEMAS, **ADMIN_SCHEMAS},
            "responses": {str(status): _error_response(status) for status in _EXAMPLES_OF_ERRORS},
            "parameters": {"Details": _DETAILS},
            "headers": {
                "Ignored": _header("Fields of the request that had no effect."),
                "Unsupported": _header("Known fields that cannot be honoured, where the server reports these."),
                "RequestId": _header("The id of the request, as in the log."),
                "Rate": _header("A rate limit of the caller: the limit, what remains, and when it is full again."),
                "RetryAfter": {"description": "Seconds.", "schema": {"type": "integer"}},
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _surface_paths(
    routes: Sequence[Route], limits: LimitsSettings, components: dict[str, JsonSchema]
) -> dict[str, Any]:
    """Return the paths of surfaces; one that exists with and without ``/v1`` is listed without it.

    Adds the parts of plugins' bodies to ``components``.
    """
    known = {route.path for route in routes}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.path.startswith("/v1/") and route.path.removeprefix("/v1") in known:
            continue
        item = paths.setdefault(re.sub(r":\w+}", "}", route.path), {})
        if route.header is not None and route.method.lower() in item:
            continue  # an address that two surfaces share is described once
        item[route.method.lower()] = _route_operation(route, limits, components)
        if f"/v1{route.path}" not in known:
            item["servers"] = _ROOT
        if names := re.findall(r"{(\w+)", route.path):
            item["parameters"] = [_PARAMETERS.get(name) or _path_parameter(name) for name in names]
    return paths


def _path_parameter(name: str, **more: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, **more}


_PARAMETERS = {"model_id": _path_parameter("model_id", description="A name or alias; it may hold slashes.")}


def _route_operation(route: Route, limits: LimitsSettings, components: dict[str, JsonSchema]) -> dict[str, Any]:
    content = {"application/json": {"schema": dict(route.response_schema)}}
    if route.body is None:
        return _operation(route.name, route.summary, content, (401, 403, 404) if "{" in route.path else (401, 403))
    headers = {"x-enginehouse-ignored": "Ignored", "x-enginehouse-unsupported": "Unsupported"}
    refusals = tuple(_REFUSALS)
    if isinstance(route, GenerationRoute):
        content |= _stream(route)
        refusals = (*_REFUSALS, *_TIMEOUTS)
        headers |= {"x-request-id": "RequestId", **dict.fromkeys(RATE_HEADERS, "Rate")}
    operation = _operation(route.name, route.summary, content, refusals)
    if isinstance(route, GenerationRoute):
        operation["parameters"] = [{"$ref": "#/components/parameters/Details"}]
    operation["responses"]["200"]["headers"] = {
        name: {"$ref": f"#/components/headers/{component}"} for name, component in headers.items()
    }
    operation["requestBody"] = {"required": True, "content": {"application/json": _body(route, limits, components)}}
    return operation


def _body(route: Route, limits: LimitsSettings, components: dict[str, JsonSchema]) -> dict[str, Any]:
    """Return the schema of a route's body, with examples that the limits of this server allow."""
    if route.request_schema is None:
        schemas = ClassSchemas(limits, f"{route.name}.", components)
        return {"schema": schemas.object_schema(cast(type[Any], route.body))}
    most = {"max_tokens": limits.max_tokens, "n": limits.max_choices, "best_of": limits.max_choices}
    examples = {}
    for title, body in REQUEST_EXAMPLES.get(route.request_schema.get("$ref", "").rpartition("/")[2], {}).items():
        bounded = {name: min(body[name], limit) for name, limit in most.items() if limit and name in body}
        examples[title] = {"value": {**body, **bounded}}
    return {"schema": dict(route.request_schema), **({"examples": examples} if examples else {})}


def _server_paths() -> dict[str, Any]:
    health = _operation("check_health", "Whether requests can be served now", _json("Health"), (403,))
    health["responses"]["503"] = {"description": "Not now.", "content": _json("Health")}
    health["security"] = []
    schema = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/health": {"servers": _ROOT, "get": health},
        "/schema": {"servers": _ROOT, "get": _operation("show_schema", "This document", schema, (401, 403))},
    }


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


def _stream(route: GenerationRoute) -> dict[str, Any]:
    """Return the description of a stream. OpenAPI 3.1 has no event schemas, so they are in an extension field."""
    chunk, frame = route.chunk_schema, route.frame
    name = chunk.get("$ref", "chunk").rpartition("/")[2]
    before, last = frame.before.decode(), frame.last.decode().strip()
    description = f"Events `{before}<{name}>`" + (f", at the end `{last}`" if last else "")
    description += f"; or `{before}<Error>` where the answer breaks off."
    return {
        frame.media_type.partition(";")[0]: {
            "schema": {"type": "string", "description": description},
            "x-event-schema": {"anyOf": [dict(chunk), reference("Error")]},
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


def schema_route(state: ApiState, routes: Sequence[Route]) -> HTTPRouteHandler:
    """Return the route; the document describes ``routes`` of surfaces, and those of core."""

    @functools.cache
    def encoded() -> bytes:
        return encode_json(
            build_document(
                routes, state.registry.request_fields, state.settings.limits, state.settings.server.root_path
            )
        )

    @get(["/schema", "/schema/openapi.json"])
    async def show_schema() -> Response[bytes]:
        """Show the OpenAPI document."""
        return Response(encoded(), media_type="application/json")

    return show_schema
