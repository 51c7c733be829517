"""Equality and types of JSON values."""

from __future__ import annotations

from typing import Any

__all__ = ["is_of_type", "key_of"]

_CLASSES: dict[str, type] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def key_of(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, key_of(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(key_of, value)))
    kind = {bool: "boolean", str: "string", type(None): "null"}.get(type(value), "number")
    return (kind, value)


def is_of_type(name: str, value: Any) -> bool:
    """Return True if a value has a type of JSON Schema; integers are numbers, and 1.0 is an integer."""
    if name not in ("integer", "number"):
        return isinstance(value, _CLASSES[name])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (name == "number" or isinstance(value, int) or value.is_integer())
