"""Reads the request fields that name adapters: ``adapters``, OctoAI's ``peft``, and llama-server's ``lora``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.rows import JsonSchema

__all__ = [
    "ADAPTERS_SCHEMA",
    "ADAPTER_FIELDS",
    "LORA_SCHEMA",
    "MAX_ADAPTERS_PER_REQUEST",
    "PEFT_SCHEMA",
    "AskedAdapters",
    "find_ignored_in_lora",
    "read_adapters",
]

AskedAdapters = tuple[tuple[str | int, float | None], ...]
"""Names, or places in the settings counted from 0, each with its scale; None is the scale of the settings."""

ADAPTER_FIELDS = ("adapters", "peft", "lora")
"""Request fields that name adapters; a request may use one of them."""
MAX_ADAPTERS_PER_REQUEST = 16
"""Most adapters that one request may name."""

_NONE: Mapping[str, tuple[Any, ...]] = {"adapters": ([], {}), "peft": ({},), "lora": ([],)}
"""Values that name no adapter."""

_SCALES: JsonSchema = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_NAME: JsonSchema = {"type": "string", "minLength": 1}
PEFT_SCHEMA: JsonSchema = {"anyOf": [_NAME, _SCALES, {"type": "null"}]}
"""JSON Schema of a field that takes the name of one adapter, or scales by name."""
ADAPTERS_SCHEMA: JsonSchema = {
    "anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": MAX_ADAPTERS_PER_REQUEST}, _SCALES, {"type": "null"}]
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
