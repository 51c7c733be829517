"""The tables of request fields in docs/api.md and docs/sampling.md, from the rows, and the one of sampling steps."""

from __future__ import annotations

import json
from typing import Any

import attrs

from enginehouse.api.openapi.fields import ClassSchemas
from enginehouse.contract.fields import ChatFields, CompletionFields, GenerationFields, ParameterFields
from enginehouse.contract.rows import row_of
from enginehouse.contract.sampler import CORE_ORDER, SamplerPlugin, role_of
from enginehouse.contract.types import SamplingParams, StopParams
from enginehouse.pipeline.parameters import OFF_VALUES
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings

__all__ = ["body_table", "body_tables", "field_table", "step_table"]

_BOUNDS = {
    "minimum": "from {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "to {:g}",
    "exclusiveMaximum": "below {:g}",
}
_LARGE = 2**31 - 1
"""Bounds from here on are only those of the number's type."""


def step_table() -> str:
    """One row per step of an installation with the first-party samplers."""
    plugins = _samplers()
    steps = {name: (place, list(OFF_VALUES[name]), "core") for name, place in CORE_ORDER.items()}
    steps |= {
        plugin.name: (plugin.order, [a.name for a in attrs.fields(plugin.request_fields)], role_of(plugin))
        for plugin in plugins.values()
    }
    rows = [
        f"| `{name}` | {place} | {role} | {', '.join(f'`{field}`' for field in fields)} |\n"
        for name, (place, fields, role) in sorted(steps.items(), key=lambda step: (step[1][0], step[1][2] != "core"))
    ]
    return "".join(["| step | place | by | fields |\n", "|---|---|---|---|\n", *rows])


def field_table() -> str:
    """One row per field that draws or stops; core's first, in the order of its class."""
    wanted = {*SamplingParams.__struct_fields__, *StopParams.__struct_fields__}
    defaults = {field: value for fields in OFF_VALUES.values() for field, value in fields.items()}
    properties = {name: schema for name, schema in _properties(ParameterFields).items() if name in wanted}
    for plugin in _samplers().values():
        properties |= _properties(plugin.request_fields)
        defaults |= {attribute.name: attribute.default for attribute in attrs.fields(plugin.request_fields)}
    rows = [
        f"| `{name}` | {_values(schema)} | {_shown(defaults.get(name, ''))} | {schema['description']} |\n"
        for name, schema in properties.items()
    ]
    return "".join(["| field | values | default | meaning |\n", "|---|---|---|---|\n", *rows])


def body_tables() -> dict[str, str]:
    """Name of a table to its text, one row per field: of both generating endpoints, of chats, of completions."""
    return {
        "common-fields": body_table(GenerationFields, with_inherited=True),
        "chat-fields": body_table(ChatFields, with_inherited=False),
        "completion-fields": body_table(CompletionFields, with_inherited=False),
    }


def body_table(table: type[Any], *, with_inherited: bool) -> str:
    """One row per field of a body."""
    off = {field: value for fields in OFF_VALUES.values() for field, value in fields.items()}
    properties = _properties(table)
    rows = []
    for attribute in attrs.fields(table):
        if attribute.inherited and not with_inherited:
            continue
        schema, limit = properties[attribute.name], row_of(attribute).limit
        values = _values(schema) + (f", at most `limits.{limit[1]}`" if limit is not None else "")
        default = off.get(attribute.name, attribute.default)
        shown = "required" if default is attrs.NOTHING else _default(default)
        rows.append(f"| `{attribute.name}` | {values} | {shown} | {schema['description']} |\n")
    return "".join(["| field | values | default | meaning |\n", "|---|---|---|---|\n", *rows])


def _default(value: Any) -> str:
    if value is None or value in ("", ()) or isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        return ""
    return json.dumps(value) if isinstance(value, bool) else _shown(value)


def _samplers() -> dict[str, SamplerPlugin]:
    samplers = PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers
    return dict(sorted(samplers.items(), key=lambda item: item[1].order))


def _properties(fields: type[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = ClassSchemas().object_schema(fields)["properties"]
    return properties


def _values(schema: dict[str, Any]) -> str:
    options = schema.get("anyOf", schema.get("oneOf", [schema]))
    if "enum" in options[0] and len(options) <= 2:
        return ", ".join(str(value) for value in options[0]["enum"])
    bounds = [
        text.format(schema[bound]) for bound, text in _BOUNDS.items() if bound in schema and abs(schema[bound]) < _LARGE
    ]
    if bounds:
        return " ".join(bounds)
    kinds = [option.get("type", "object") for option in options]  # a reference is an object
    named = [kind for one in kinds for kind in (one if isinstance(one, list) else [one])]
    return " or ".join(kind for kind in dict.fromkeys(named) if kind != "null")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(f"`{json.dumps(value)}`" for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)
