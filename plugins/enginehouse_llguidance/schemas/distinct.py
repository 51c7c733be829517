"""``uniqueItems`` in prepared schemas: refuses arrays that could run out of different items.

Enforced while the answer is written (:mod:`enginehouse_llguidance.unique`), which never goes back: where at least two
items are needed, there must be as many different ones; and where a value may take several branches, all arrays among
them must be unique, since the branch is not known before the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from attrs import define, field

from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.values import key_of

__all__ = ["UNIQUE", "UNIQUE_NAMES", "check_distinct", "count_values"]

UNIQUE = "x-unique"
"""Keyword of prepared arrays without equal items; the library ignores it."""

UNIQUE_NAMES = "x-unique-names"
"""The same for names: of objects whose names are counted."""

_ENDLESS = ("*", "+", ",}")
_MAX_DEPTH = 16
_MAX_LOOKED_AT = 200_000
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
    together = _Together(definitions)
    for pointer, part in parts if arrays else ():
        if isinstance(part, dict) and any(key in part for key in ("allOf", "anyOf", "$ref")):
            together.check(pointer, part)
        if isinstance(part, dict) and "anyOf" in part:
            kinds = {kind for option in part["anyOf"] for kind in _arrays(option, definitions, 0)}
            if kinds == {True, False}:
                message = "uniqueItems is not supported where another branch allows an array with equal items"
                raise SchemaProblem(pointer, message)
    return bool(arrays or objects)


@define
class _Together:
    """Check of arrays whose keywords are in several schemas: of ``allOf``, ``anyOf`` and references.

    Attributes:
        room: number of schemas that may still be looked at, in all combinations of branches.
    """

    definitions: Mapping[str, Any]
    room: int = _MAX_LOOKED_AT
    counts: dict[int, float] = field(factory=dict)

    def check(self, pointer: str, part: Mapping[str, Any]) -> None:
        """Raise SchemaProblem if an array at a part may run out of different items."""
        if not self._is_unique(pointer, part):
            return
        least: dict[tuple[Any, ...], tuple[int, list[Any]]] = {}
        for schemas in self._combinations(pointer, part):
            if not any(UNIQUE in one for one in schemas) or not all(
                "array" in one.get("type", "array") for one in schemas
            ):
                continue
            for one in schemas:
                self._check_contained(pointer, one)
            low = max(one.get("minItems", 0) for one in schemas)
            items = [one["items"] for one in schemas if one.get("items", True) not in (True, {})]
            # Branches that differ in nothing but their least number of items, as those of contains: one is enough.
            key = (*map(id, items), None, *(one["maxItems"] for one in schemas if "maxItems" in one))
            least[key] = min(least.get(key, (low, items)), (low, items), key=itemgetter(0))
        for low, items in least.values():
            is_one = all(item == items[0] for item in items)
            if low > 1 and items and low > (self._count(items[0]) if is_one else 1):
                message = f"there may be fewer than the {low} different items that minItems asks for"
                raise SchemaProblem(join_pointer(pointer, ["uniqueItems"]), message)

    def _check_contained(self, pointer: str, schema: Mapping[str, Any]) -> None:
        """Check a branch of ``contains``, which asks for several items of one schema."""
        asked = [item for item in schema.get("prefixItems", ())[: schema.get("minItems", 0)] if item is not True]
        if len(asked) > 1 and all(item == asked[0] for item in asked) and len(asked) > self._count(asked[0]):
            message = f"there may be fewer than the {len(asked)} different items that are asked for, as by minContains"
            raise SchemaProblem(join_pointer(pointer, ["uniqueItems"]), message)

    def _count(self, schema: Any) -> float:
        if id(schema) not in self.counts:
            self.counts[id(schema)] = count_values(schema, self.definitions)
        return self.counts[id(schema)]

    def _inner(self, schema: Mapping[str, Any]) -> list[list[Any]]:
        """Return the schemas at the same value, one list of alternatives for each keyword."""
        referred = [[self.definitions[schema["$ref"].rpartition("/")[2]]]] if "$ref" in schema else []
        options = [schema["anyOf"]] if "anyOf" in schema else []
        return [*([one] for one in schema.get("allOf", ())), *referred, *options]

    def _is_unique(self, pointer: str, part: Any) -> bool:
        waiting, found = [part], set[int]()
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict) and id(one) not in found:
                self._spend(pointer, 1)
                found.add(id(one))
                if UNIQUE in one:
                    return True
                waiting += [inner for group in self._inner(one) for inner in group]
        return False

    def _combinations(self, pointer: str, schema: Any) -> list[list[Mapping[str, Any]]]:
        """Return the schemas that apply to a value together, for each choice of branches."""
        if not isinstance(schema, dict):
            return [[]]
        found: list[list[Mapping[str, Any]]] = [[schema]]
        for group in self._inner(schema):
            others = [way for one in group for way in self._combinations(pointer, one)]
            self._spend(pointer, len(found) * sum(map(len, others)) + len(others) * sum(map(len, found)))
            found = [[*one, *other] for one in found for other in others]
        return found

    def _spend(self, pointer: str, number: int) -> None:
        self.room -= number
        if self.room < 0:
            raise SchemaProblem(pointer, "uniqueItems is not supported beside too many combinations of schemas")


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


def _count_of(  # noqa: PLR0911 - one per form
    name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int
) -> float:
    if name in ("null", "boolean"):
        return 1 if name == "null" else 2
    if name in ("integer", "number"):
        step = schema.get("multipleOf", 1)
        span = schema.get("maximum", math.inf) - schema.get("minimum", -math.inf)
        return math.inf if span >= _MANY * step else max(1.0, span // step)
    if name == "string":
        if "pattern" not in schema:
            return math.inf if schema.get("maxLength", 1) > 0 else 1
        is_endless = any(one in schema["pattern"] for one in _ENDLESS) and "maxLength" not in schema
        return math.inf if is_endless else 1
    if name == "array":
        first = [*schema.get("prefixItems", ()), schema.get("items", True)][0]
        return count_values(first, definitions, depth + 1) if schema.get("maxItems", 1) > 0 else 1
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
