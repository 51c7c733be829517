"""JSON types that a schema allows, for values that a model writes without quotation marks."""

from __future__ import annotations

from typing import Any

__all__ = ["type_of", "types_of"]

_ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_MAX_DEPTH = 8


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a value may have; all of them where the schema does not say it.

    Args:
        schema: the schema of the value.
        root: the schema in which its references are resolved.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set(_ALL)
    found: set[str] = set(_ALL)
    kind = schema.get("type")
    if isinstance(kind, str):
        found &= {kind}
    elif isinstance(kind, list):
        found &= {name for name in kind if isinstance(name, str)}
    if "number" in found:
        found.add("integer")
    if "enum" in schema and isinstance(schema["enum"], list):
        found &= set().union(*map(_types_of_value, schema["enum"]))
    if "const" in schema:
        found &= _types_of_value(schema["const"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            found &= set().union(*(types_of(branch, root, depth + 1) for branch in branches))
    for branch in schema.get("allOf", ()) if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(branch, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        found &= types_of(target, root, depth + 1)
    return found or set(_ALL)


def type_of(value: Any) -> str:
    """Return the type of a JSON value."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _types_of_value(value: Any) -> set[str]:
    found = type_of(value)
    return {"integer", "number"} if found == "integer" else {found}
