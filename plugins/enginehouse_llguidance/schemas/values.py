"""Equality of JSON values."""

from __future__ import annotations

from typing import Any

__all__ = ["key_of"]


def key_of(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, key_of(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(key_of, value)))
    kind = {bool: "boolean", str: "string", type(None): "null"}.get(type(value), "number")
    return (kind, value)
