"""``uniqueItems`` in prepared schemas: refuses arrays that could run out of different items.

Enforced while the answer is written (:mod:`enginehouse_llguidance.unique`), which never goes back: where at least two
items are needed, there must be as many different ones; and where a value may take several branches, all arrays among
them must be unique, since the branch is not known before the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.values import key_of

__all__ = ["UNIQUE", "UNIQUE_NAMES", "check_distinct", "count_values"]

UNIQUE = "x-unique"
"""Keyword of prepared arrays without equal items; the library ignores it."""

UNIQUE_NAMES = "x-unique-names"
"""The same for names: of objects whose names are counted."""

_ENDLESS = ("*", "+", ",}")
_MAX_DEPTH = 16
_MANY = 1_000_000  # no answer has as many items


def check_distinct(parts: Sequence[tuple[str, Any]], definitions: Mapping[str, Any]) -> bool:
    """Return True if some array must have different items, or some object different names.

    Args:
        parts: pointer and prepared schema of every part.
        definitions: definitions referenced by the parts, by name.

    Raises:
        SchemaProblem: an array may run out of them.
    """
    arrays = [(pointer, part) for pointer, part in parts if isinstance(part, dict) and UNIQUE in part]
    objects = [(pointer, part) for pointer, part in parts if isinstance(part, dict) and UNIQUE_NAMES in part]
    for pointer, part in objects:
        if not all(any(one in name for one in _ENDLESS) for name in part.get("patternProperties", ())):
            raise SchemaProblem(join_pointer(pointer, ["minProperties"]), "there may be fewer different names")
    for pointer, part in arrays:
        low = part.get("minItems", 0)
        prefix = part.get("prefixItems", [])
        needed = [*prefix[:low], part.get("items", True)] if low > len(prefix) else prefix[:low]
        if low > 1 and any(count_values(one, definitions) < (low if len(needed) == 1 else math.inf) for one in needed):
            message = f"there may be fewer than the {low} different items that minItems asks for"
            raise SchemaProblem(join_pointer(pointer, ["uniqueItems"]), message)
    for pointer, part in parts:
        if isinstance(part, dict) and "anyOf" in part:
            kinds = {kind for option in part["anyOf"] for kind in _arrays(option, definitions, 0)}
            if kinds == {True, False}:
                message = "uniqueItems is not supported where another branch allows an array with equal items"
                raise SchemaProblem(pointer, message)
    return bool(arrays or objects)


def count_values(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> float:
    """Return a number of different values that a prepared schema has at least."""
    if schema is True or schema == {}:
        return math.inf
    if not isinstance(schema, dict) or depth > _MAX_DEPTH or "allOf" in schema:
        return 1
    if "enum" in schema or "const" in schema:
        return len({key_of(value) for value in schema.get("enum", [schema.get("const")])})
    if "$ref" in schema:
        alone = set(schema) == {"$ref"}
        return count_values(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1) if alone else 1
    if "anyOf" in schema:
        return (
            max(count_values(one, definitions, depth + 1) for one in schema["anyOf"]) if set(schema) == {"anyOf"} else 1
        )
    named = schema.get("type", "string")
    return max(_count_of(name, schema, definitions, depth) for name in ([named] if isinstance(named, str) else named))


def _count_of(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> float:
    if name in ("null", "boolean"):
        return 1 if name == "null" else 2
    if name in ("integer", "number"):
        step = schema.get("multipleOf", 1)
        span = schema.get("maximum", math.inf) - schema.get("minimum", -math.inf)
        return math.inf if span >= _MANY * step else max(1.0, span // step)
    if name == "string":
        pattern = schema.get("pattern")
        return math.inf if pattern is None or any(one in pattern for one in _ENDLESS) else 1
    if name == "array":
        return count_values(schema.get("items", True), definitions, depth + 1) if schema.get("maxItems", 1) > 0 else 1
    if "patternProperties" in schema or "maxProperties" in schema:
        return 1
    counts = [
        count_values(one, definitions, depth + 1) for one in schema.get("properties", {}).values() if one is not False
    ]
    return max(counts, default=1 if schema.get("additionalProperties") is False else math.inf)


def _arrays(  # noqa: PLR0911 - one per form
    schema: Any, definitions: Mapping[str, Any], depth: int
) -> set[bool]:
    """Return whether the arrays of a schema are unique: none, one or both answers."""
    if schema is True or depth > _MAX_DEPTH:
        return {False}
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return set()
    if UNIQUE in schema:
        return {True}
    found = set().union(*(_arrays(one, definitions, depth + 1) for one in schema.get("anyOf", ())))
    for one in schema.get("allOf", ()):
        inner = _arrays(one, definitions, depth + 1)
        if True in inner or not inner:
            return inner
    if "$ref" in schema:
        inner = _arrays(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1)
        if True in inner or not inner:
            return inner
    if "anyOf" in schema:
        return found
    named = schema.get("type", "array")
    return {False} if "array" in ([named] if isinstance(named, str) else named) else set()
