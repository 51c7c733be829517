"""Schemas of request bodies, from the classes that decode them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.api.openai.tokens import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from enginehouse.api.openapi.fields import ClassSchemas, JsonSchema
from enginehouse.contract.rows import RequestField, classes_of
from enginehouse.settings.config import LimitsSettings

__all__ = ["request_schemas"]


def request_schemas(plugin_fields: Mapping[str, RequestField], limits: LimitsSettings) -> dict[str, JsonSchema]:
    """Return component name to schema for every request body and its parts. Plugins add their fields."""
    schemas = ClassSchemas(limits)
    bodies = {
        "ChatCompletionRequest": schemas.object_schema(ChatBody),
        "CompletionRequest": schemas.object_schema(CompletionBody),
        "RouteRequest": schemas.object_schema(ChatBody),
        "TokenizeRequest": schemas.object_schema(TokenizeBody),
        "DetokenizeRequest": schemas.object_schema(DetokenizeBody),
        "ApplyTemplateRequest": schemas.object_schema(ApplyTemplateBody),
    }
    for name, fields_class in classes_of(plugin_fields.values()).items():
        declared = schemas.object_schema(fields_class)["properties"]
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
    for name in body_class.find_ignored(dict.fromkeys(names) | {"details": True}):
        schema["properties"].pop(name, None)
