"""The tables of docs/sampling.md: the steps in their order, and the fields that control them, from the source."""

from __future__ import annotations

import json
from typing import Any

import attrs

from enginehouse.api.openapi.fields import ClassSchemas
from enginehouse.contract.fields import ParameterFields
from enginehouse.contract.sampler import CORE_ORDER, SamplerPlugin, role_of
from enginehouse.contract.types import SamplingParams, StopParams
from enginehouse.pipeline.parameters import OFF_VALUES
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, PluginsSettings

__all__ = ["field_table", "step_table"]

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


def _samplers() -> dict[str, SamplerPlugin]:
    samplers = PluginRegistry.load(PluginsSettings(allow=("samplers",))).samplers
    return dict(sorted(samplers.items(), key=lambda item: item[1].order))


def _properties(fields: type[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = ClassSchemas(LimitsSettings()).object_schema(fields)["properties"]
    return properties


def _values(schema: dict[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    if "enum" in options[0]:
        return ", ".join(str(value) for value in options[0]["enum"])
    bounds = [
        text.format(schema[bound]) for bound, text in _BOUNDS.items() if bound in schema and abs(schema[bound]) < _LARGE
    ]
    if bounds:
        return " ".join(bounds)
    kinds = [option["type"] for option in options]
    kinds = kinds[0] if isinstance(kinds[0], list) else kinds
    return " or ".join(kind for kind in kinds if kind != "null")


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(f"`{json.dumps(value)}`" for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)
