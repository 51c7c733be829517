"""Structured values of request fields: the classes of their parts, JSON Schemas, and the fields that name adapters.

The rows of :mod:`enginehouse.contract.fields` refer to them. Does not know what a value means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.rows import JsonSchema, row

__all__ = [
    "ADAPTERS_SCHEMA",
    "ADAPTER_FIELDS",
    "CHOICES",
    "JSON_SCHEMA",
    "LORA_SCHEMA",
    "MAX_ADAPTERS_PER_REQUEST",
    "NO_EFFECT",
    "PEFT_SCHEMA",
    "PREDICTION",
    "PROMPT",
    "RESPONSE_FORMAT",
    "SOME_TEXT",
    "STRUCTURED_OUTPUTS",
    "TOKEN_ID",
    "TOOL_CHOICE",
    "AskedAdapters",
    "Effort",
    "FunctionBody",
    "MessageBody",
    "StreamOptions",
    "ToolBody",
    "find_ignored_in_lora",
    "read_adapters",
]


NO_EFFECT = "Accepted so that clients work; has no effect."
"""Description of such a field."""


def _object(properties: JsonSchema, *required: str) -> JsonSchema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


_TEXT: JsonSchema = {"type": "string"}
SOME_TEXT: JsonSchema = {"type": "string", "minLength": 1}
"""A string that is not empty."""
TOKEN_ID: JsonSchema = {"type": "integer", "minimum": 0}
"""A token id."""
CHOICES: JsonSchema = {"type": "array", "items": _TEXT, "minItems": 1}
"""Strings of which one is to be generated."""
JSON_SCHEMA: JsonSchema = {
    "type": ["object", "boolean", "string"],
    "description": "A JSON Schema, or one as JSON text.",
}
"""A JSON Schema in a request."""
_NAME: JsonSchema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_TEXT_PART = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
_MESSAGE_TEXT_PART = _object(
    {"type": {"const": "text"}, "text": _TEXT, "compress": {"type": ["boolean", "null"]}}, "type", "text"
)
_REFUSAL_PART = _object({"type": {"const": "refusal"}, "refusal": _TEXT}, "type", "refusal")
_ARGUMENTS: JsonSchema = {"type": ["string", "object", "null"], "description": "JSON text, or an object."}
_TOOL_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _ARGUMENTS}, "name")},
    "function",
)
_NAMED_TOOL = _object({"type": {"const": "function"}, "function": _object({"name": _NAME}, "name")}, "type", "function")
_ALLOWED_TOOLS = _object(
    {
        "type": {"const": "allowed_tools"},
        "allowed_tools": _object(
            {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED_TOOL, "minItems": 1}},
            "mode",
            "tools",
        ),
    },
    "type",
    "allowed_tools",
)
TOOL_CHOICE: JsonSchema = {
    "anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED_TOOL, _ALLOWED_TOOLS]
}
"""Value of ``tool_choice`` of OpenAI's chats."""
_NAMED_SCHEMA = _object(
    {
        "name": _TEXT,
        "description": {"type": ["string", "null"]},
        "strict": {"type": ["boolean", "null"]},
        "schema": JSON_SCHEMA,
    },
    "schema",
)
RESPONSE_FORMAT: JsonSchema = {
    "oneOf": [
        _object({"type": {"const": "text"}}, "type"),
        _object({"type": {"const": "json_object"}, "schema": JSON_SCHEMA}, "type"),
        _object({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, "type", "json_schema"),
    ]
}
"""Value of ``response_format`` of OpenAI's chats."""
STRUCTURED_OUTPUTS = _object(
    {
        "json": JSON_SCHEMA,
        "regex": SOME_TEXT,
        "choice": CHOICES,
        "grammar": {**SOME_TEXT, "description": "GBNF or Lark."},
        "json_object": {"type": "boolean"},
        "disable_any_whitespace": {"type": "boolean"},
    }
)
"""Value of ``structured_outputs``, as in vLLM."""
PREDICTION = _object(
    {"type": {"const": "content"}, "content": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}]}},
    "type",
    "content",
)
"""Value of ``prediction`` of OpenAI's chats."""
PROMPT: JsonSchema = {
    "oneOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        {"type": "array", "items": TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": TOKEN_ID, "minItems": 1}, "minItems": 1},
    ]
}
"""Value of ``prompt`` of OpenAI's completions."""
_CONTENT: JsonSchema = {
    "anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_MESSAGE_TEXT_PART, _REFUSAL_PART]}, "minItems": 1}]
}
_ROLES: JsonSchema = {"enum": ["system", "developer", "user", "assistant", "tool"]}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""Levels of reasoning effort."""


@frozen(kw_only=True)
class StreamOptions:
    """``stream_options``. Obfuscation pads streams to hide lengths from eavesdroppers; accepted, without effect."""

    include_usage: bool = row("End with a chunk that holds the token counts.", default=False)
    include_obfuscation: bool = row(NO_EFFECT, default=False)


@frozen(kw_only=True)
class MessageBody:
    """One message as the client sent it, before its content is read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = row(
        default=attrs.NOTHING, schema=_ROLES
    )
    content: Any = row(schema=_CONTENT)
    name: str | None = None
    tool_calls: Any = row(schema={"type": "array", "items": _TOOL_CALL})
    function_call: Any = row(schema={"type": "null", "deprecated": True})
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = row("Another name of `reasoning_content`.")
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    compress: bool | None = row("False excludes this message from compression; likewise in a part of its content.")


@frozen(kw_only=True)
class FunctionBody:
    """A function. Required calls always match ``parameters``; other calls do with ``strict``."""

    name: str = row(default=attrs.NOTHING, schema=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@frozen(kw_only=True)
class ToolBody:
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionBody


AskedAdapters = tuple[tuple[str | int, float | None], ...]
"""Names, or places in the settings counted from 0, each with its scale; None is the scale of the settings."""

ADAPTER_FIELDS = ("adapters", "peft", "lora")
"""Request fields that name adapters; a request may use one of them."""
MAX_ADAPTERS_PER_REQUEST = 16
"""Most adapters that one request may name."""

_NONE: Mapping[str, tuple[Any, ...]] = {"adapters": ([], {}), "peft": ({},), "lora": ([],)}
"""Values that name no adapter."""

_SCALES: JsonSchema = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_ADAPTER: JsonSchema = {"type": "string", "minLength": 1}
PEFT_SCHEMA: JsonSchema = {"anyOf": [_ADAPTER, _SCALES, {"type": "null"}]}
"""JSON Schema of a field that takes the name of one adapter, or scales by name."""
ADAPTERS_SCHEMA: JsonSchema = {
    "anyOf": [
        _ADAPTER,
        {"type": "array", "items": _ADAPTER, "maxItems": MAX_ADAPTERS_PER_REQUEST},
        _SCALES,
        {"type": "null"},
    ]
}
"""JSON Schema of the field ``adapters``."""
LORA_SCHEMA: JsonSchema = {
    "type": ["array", "null"],
    "maxItems": MAX_ADAPTERS_PER_REQUEST,
    "items": {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer", "minimum": 0}, "scale": {"type": ["number", "null"]}},
    },
}
"""JSON Schema of the field ``lora``."""


def read_adapters(values: Mapping[str, Any]) -> tuple[str, AskedAdapters]:
    """Return the field that names adapters, and the adapters; ("", ()) if none does.

    Args:
        values: fields of a request by name; those that are None are not given.

    Raises:
        InvalidRequest: two fields name some, or a value has a wrong form.
    """
    given = [name for name in ADAPTER_FIELDS if values.get(name) is not None and values[name] not in _NONE[name]]
    if len(given) > 1:
        raise InvalidRequest(f"{given[1]}: not allowed together with {given[0]}; give one of them", given[1])
    if not given:
        return "", ()
    param = given[0]
    asked = _read_ids(values[param]) if param == "lora" else _read_names(values[param], param)
    if len(asked) > MAX_ADAPTERS_PER_REQUEST:
        raise InvalidRequest(f"{param}: at most {MAX_ADAPTERS_PER_REQUEST} adapters, not {len(asked)}", param)
    return param, asked


def _read_names(value: Any, param: str) -> AskedAdapters:
    if isinstance(value, str) and value:
        return ((value, None),)
    if isinstance(value, list | tuple) and param == "adapters" and all(isinstance(name, str) for name in value):
        return tuple((name, None) for name in value)
    if isinstance(value, Mapping):
        return tuple((name, _scale(scale, f"{param}.{name}")) for name, scale in value.items())
    listed = "a name, a list of names" if param == "adapters" else "a name"
    raise InvalidRequest(f"{param}: must be {listed}, or an object of names and scales", param)


def _read_ids(value: Any) -> AskedAdapters:
    if not isinstance(value, list | tuple):
        raise InvalidRequest('lora: must be a list of objects such as {"id": 0, "scale": 1.0}', "lora")
    found: list[tuple[str | int, float | None]] = []
    for index, item in enumerate(value):
        path = f"lora[{index}]"
        if not isinstance(item, Mapping) or not _is_number(item.get("id"), int) or item["id"] < 0:
            raise InvalidRequest(f"{path}: must be an object with an id, a number from 0 on", path)
        found.append((item["id"], _scale(item.get("scale"), f"{path}.scale")))
    return tuple(found)


def find_ignored_in_lora(value: Any) -> Iterator[str]:
    """Yield the paths of unknown members of the field ``lora``."""
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, Mapping):
            yield from (f"lora[{index}].{name}" for name in item if name not in ("id", "scale"))


def _scale(value: Any, path: str) -> float | None:
    if value is None:
        return None
    if not _is_number(value, int | float) or not math.isfinite(value) or abs(value) > 1e6:
        raise InvalidRequest(f"{path}: must be a number from -1e6 to 1e6", path)
    return float(value)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
