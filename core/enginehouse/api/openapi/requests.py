"""Schemas of request bodies, for the parts that the annotations of their classes do not express."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.api.openai.decoding import MAX_TOKEN_IDS
from enginehouse.api.openai.tokens import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from enginehouse.api.openai.tools import MAX_TOOLS
from enginehouse.api.openapi.fields import ClassSchemas, JsonSchema
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.pipeline.parameters import MAX_STOP_CHARS, MAX_STOP_TOKENS
from enginehouse.settings.config import LimitsSettings

__all__ = ["request_schemas"]

_TOKEN_ID: JsonSchema = {"type": "integer", "minimum": 0}
_NAME: JsonSchema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_SCHEMA: JsonSchema = {"type": ["object", "boolean", "string"], "description": "A JSON Schema, or one as JSON text."}
_SOME_TEXT: JsonSchema = {"type": "string", "minLength": 1}
_STOP: JsonSchema = {**_SOME_TEXT, "maxLength": MAX_STOP_CHARS}
_CHOICES: JsonSchema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TEXT_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE_TEXT_PART: JsonSchema = {
    **_TEXT_PART,
    "properties": {**_TEXT_PART["properties"], "compress": {"type": ["boolean", "null"]}},
}
_REFUSAL_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
    "required": ["type", "refusal"],
}
_TOOL_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["string", "object", "null"], "description": "JSON text, or an object."},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_NAMED_TOOL: JsonSchema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS: JsonSchema = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED_TOOL, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_RESPONSE_FORMAT: JsonSchema = {
    "oneOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": _SCHEMA},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": ["string", "null"]},
                        "strict": {"type": ["boolean", "null"]},
                        "schema": _SCHEMA,
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_STRUCTURED_OUTPUTS: JsonSchema = {
    "type": "object",
    "properties": {
        "json": _SCHEMA,
        "regex": _SOME_TEXT,
        "choice": _CHOICES,
        "grammar": {**_SOME_TEXT, "description": "GBNF or Lark."},
        "json_object": {"type": "boolean"},
        "disable_any_whitespace": {"type": "boolean"},
    },
}
_PREDICTION: JsonSchema = {
    "type": "object",
    "properties": {
        "type": {"const": "content"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["type", "content"],
}
_COMPRESSION: JsonSchema = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "properties": {
                "method": {"type": ["string", "null"]},
                "ratio": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
            },
        },
        {"type": "null"},
    ]
}
_PROMPT: JsonSchema = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
    ]
}


_NO_EFFECT = "Accepted so that clients work; has no effect."
_TEXTS: dict[tuple[str, str], str] = {
    ("ConstraintFields", "guided_json"): "Another name of `structured_outputs.json`.",
    ("ConstraintFields", "guided_regex"): "Another name of `structured_outputs.regex`.",
    ("ConstraintFields", "guided_choice"): "Another name of `structured_outputs.choice`.",
    ("ConstraintFields", "guided_grammar"): "Another name of `structured_outputs.grammar`.",
    ("GenerationBody", "model"): "A name or alias of `/models`; the first configured model without it.",
    ("GenerationBody", "stream"): "Send the answer as events, while it is made.",
    ("GenerationBody", "stream_options"): "Only with `stream`.",
    ("GenerationBody", "prompt_logprobs"): "Report how probable the prompt's tokens are, with this many alternatives.",
    ("GenerationBody", "token_details"): "Report where each token came from; only with `logprobs`.",
    **{
        ("GenerationBody", name): _NO_EFFECT
        for name in (
            "metadata",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        )
    },
    ("StreamOptions", "include_usage"): "End with a chunk that holds the token counts.",
    ("StreamOptions", "include_obfuscation"): _NO_EFFECT,
    ("ChatBody", "logprobs"): "Report how probable each token of the answer was.",
    ("ChatBody", "top_logprobs"): "Alternatives to report per token; only with `logprobs`.",
    ("ChatBody", "tools"): "Functions that the model may call.",
    ("ChatBody", "parallel_tool_calls"): "Whether one answer may hold several calls.",
    ("ChatBody", "reasoning_effort"): "How hard to think, for templates that know efforts; `none` is not at all.",
    ("DetokenizeBody", "model"): "A name or alias of `/models`; the first configured model without it.",
}
"""Descriptions of members whose class docstring has none, or none that can be read on its own."""


def _known(limits: LimitsSettings) -> dict[tuple[str, str], JsonSchema]:
    """Return keywords that annotations do not express, by class and attribute."""
    most_tokens: JsonSchema = {} if limits.max_tokens is None else {"maximum": limits.max_tokens}
    return {
        ("ParameterFields", "logit_bias"): {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        ("ParameterFields", "stop"): {
            "anyOf": [
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": limits.max_stop},
                {"type": "null"},
            ]
        },
        ("ParameterFields", "stop_token_ids"): {"items": _TOKEN_ID, "maxItems": MAX_STOP_TOKENS},
        ("ParameterFields", "max_tokens"): most_tokens,
        ("CompletionBody", "max_tokens"): most_tokens,
        ("ChatBody", "max_completion_tokens"): most_tokens,
        ("GenerationBody", "n"): {"maximum": limits.max_choices},
        ("GenerationBody", "cache_salt"): {"maxLength": 1000},
        ("GenerationBody", "prompt_cache_key"): {"maxLength": 1000},
        ("GenerationBody", "compression"): _COMPRESSION,
        ("ConstraintFields", "response_format"): _RESPONSE_FORMAT,
        ("ConstraintFields", "structured_outputs"): _STRUCTURED_OUTPUTS,
        ("ConstraintFields", "guided_json"): _SCHEMA,
        ("ConstraintFields", "guided_regex"): _SOME_TEXT,
        ("ConstraintFields", "guided_choice"): _CHOICES,
        ("ConstraintFields", "guided_grammar"): _SOME_TEXT,
        ("ConstraintFields", "grammar"): {"type": "string"},
        ("ConstraintFields", "json_schema"): _SCHEMA,
        ("ChatBody", "messages"): {"minItems": 1, "maxItems": limits.max_messages},
        ("ChatBody", "prompt"): {"minLength": 1},
        ("ChatBody", "tools"): {"maxItems": MAX_TOOLS},
        ("ChatBody", "tool_choice"): {
            "anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED_TOOL, _ALLOWED_TOOLS]
        },
        ("ChatBody", "prediction"): _PREDICTION,
        ("MessageBody", "role"): {"enum": ["system", "developer", "user", "assistant", "tool"]},
        ("MessageBody", "function_call"): {"type": "null", "deprecated": True},
        ("MessageBody", "content"): {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [_MESSAGE_TEXT_PART, _REFUSAL_PART]}, "minItems": 1},
            ]
        },
        ("MessageBody", "tool_calls"): {"type": "array", "items": _TOOL_CALL},
        ("FunctionBody", "name"): _NAME,
        ("CompletionBody", "prompt"): _PROMPT,
        ("CompletionBody", "best_of"): {"maximum": limits.max_choices},
        ("DetokenizeBody", "tokens"): {"type": "array", "items": _TOKEN_ID, "maxItems": MAX_TOKEN_IDS},
        ("TokenizeBody", "prompt"): {"minLength": 0},
    }


def request_schemas(samplers: Mapping[str, SamplerPlugin], limits: LimitsSettings) -> dict[str, JsonSchema]:
    """Return component name to schema for every request body and its parts. Sampler plugins add their fields."""
    known = _known(limits)
    for key, text in _TEXTS.items():
        known[key] = {**known.get(key, {}), "description": text}
    schemas = ClassSchemas(known)
    bodies = {
        "ChatCompletionRequest": schemas.object_schema(ChatBody),
        "CompletionRequest": schemas.object_schema(CompletionBody),
        "RouteRequest": schemas.object_schema(ChatBody),
        "TokenizeRequest": schemas.object_schema(TokenizeBody),
        "DetokenizeRequest": schemas.object_schema(DetokenizeBody),
        "ApplyTemplateRequest": schemas.object_schema(ApplyTemplateBody),
    }
    for name, sampler in samplers.items():
        declared = schemas.object_schema(sampler.request_fields)["properties"]
        for field_schema in declared.values():
            field_schema["x-plugin"] = name
        for body in ("ChatCompletionRequest", "CompletionRequest", "RouteRequest"):
            bodies[body]["properties"] |= declared
    for body in ("ChatCompletionRequest", "RouteRequest"):
        bodies[body]["oneOf"] = [{"required": ["messages"]}, {"required": ["prompt"]}]
    bodies["TokenizeRequest"]["oneOf"] = [{"required": [name]} for name in ("content", "prompt", "messages")]
    bodies["ApplyTemplateRequest"]["required"] = ["messages"]
    for body_class, body in ((TokenizeBody, "TokenizeRequest"), (ApplyTemplateBody, "ApplyTemplateRequest")):
        _keep_effective(body_class, bodies[body])
    return {**schemas.components, **bodies}


def _keep_effective(body_class: type[ChatBody], schema: JsonSchema) -> None:
    """Remove fields that are accepted but have no effect."""
    names = [attribute.name for attribute in attrs.fields(body_class)]
    for name in body_class.find_ignored(dict.fromkeys(names)):
        schema["properties"].pop(name, None)
