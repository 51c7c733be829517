"""Proves that no value matches two schemas, so ``oneOf`` is equivalent to ``anyOf``. Proves it or gives up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from enginehouse_llguidance.schemas.document import Document, Pointer
from enginehouse_llguidance.schemas.problems import SchemaProblem
from enginehouse_llguidance.schemas.values import key_of

__all__ = ["ObjectNames", "find_overlaps", "names_of"]

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAX_DEPTH = 8


def find_overlaps(document: Document, options: list[Any], parent: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the indexes of each two options that some value may match.

    Args:
        document: the whole schema, for references.
        parent: the schema that contains the options; its other keywords apply to each of them.
    """
    base = _facts_of(document, {key: value for key, value in parent.items() if key != "oneOf"}, 0)
    facts = [_facts_of(document, option, 0).joined(base) for option in options]
    return [
        (first, second)
        for second in range(1, len(facts))
        for first in range(second)
        if not _are_disjoint(document, facts[first], facts[second], 0)
    ]


@frozen
class ObjectNames:
    """Names of an object's properties.

    Attributes:
        is_closed: it has no others.
    """

    names: tuple[str, ...]
    is_closed: bool


def names_of(document: Document, schema: Any) -> ObjectNames:
    """Return what is known of the names of an object that matches a schema."""
    facts = _facts_of(document, schema, 0)
    return ObjectNames(tuple(dict.fromkeys(name for name, _ in facts.properties)), facts.is_closed)


@frozen
class _Facts:
    """Known properties of every value that matches a schema.

    Attributes:
        types: types of the value; integers count as numbers.
        values: all possible values, as comparable keys; None means any.
        properties: schemas of the properties of an object, by name.
        required: names of the required properties of an object.
        is_closed: an object has no properties other than ``properties``.
    """

    types: frozenset[str] = _TYPES
    values: frozenset[Any] | None = None
    properties: tuple[tuple[str, Any], ...] = ()
    required: frozenset[str] = frozenset()
    is_closed: bool = False

    def joined(self, other: _Facts) -> _Facts:
        """Return the facts if both hold; of two schemas for one property, either suffices for a proof."""
        values = self.values if other.values is None else other.values if self.values is None else None
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        return _Facts(
            self.types & other.types,
            values,
            (*other.properties, *self.properties),
            self.required | other.required,
            self.is_closed,
        )


def _facts_of(document: Document, schema: Any, depth: int) -> _Facts:
    if schema is False:
        return _Facts(types=frozenset())
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return _Facts()
    facts = _Facts(_types(schema), _values(schema), _properties(schema), _required(schema), _is_closed(schema))
    if isinstance(schema.get("$ref"), str) and (isinstance(schema["$ref"], Pointer) or not document.has_resources):
        try:
            _, target = document.target(schema, "")
        except SchemaProblem:
            return facts  # reported when the reference is checked
        referred = _facts_of(document, target, depth + 1)
        facts = facts.joined(referred) if len(schema) > 1 else referred
    return facts


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", [])
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return frozenset(types) & _TYPES if types else _TYPES


def _values(schema: dict[str, Any]) -> frozenset[Any] | None:
    if "const" in schema:
        return frozenset({key_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(key_of, schema["enum"]))
    return None


def _properties(schema: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    properties = schema.get("properties")
    return tuple(properties.items()) if isinstance(properties, dict) else ()


def _required(schema: dict[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _are_disjoint(document: Document, left: _Facts, right: _Facts, depth: int) -> bool:
    types = left.types & right.types
    for facts in (left, right):
        if facts.values is not None:
            types &= {key[0] for key in facts.values}
    if not types:
        return True
    if left.values is not None and right.values is not None:
        return not left.values & right.values
    return types == {"object"} and any(_shared_property_tells(document, left, right, depth))


def _shared_property_tells(document: Document, left: _Facts, right: _Facts, depth: int) -> Iterator[bool]:
    """Yield, for each property that a value of both must have, True if no property value matches both."""
    if depth > _MAX_DEPTH:
        return
    for name in left.required | right.required:
        schemas = [[schema for key, schema in facts.properties if key == name] for facts in (left, right)]
        if any(facts.is_closed and not found for facts, found in zip((left, right), schemas, strict=True)):
            yield True
        for first in schemas[0]:
            for second in schemas[1]:
                yield _are_disjoint(document, _facts_of(document, first, 0), _facts_of(document, second, 0), depth + 1)
