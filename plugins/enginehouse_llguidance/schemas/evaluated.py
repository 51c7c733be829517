"""The properties and items that other keywords evaluate: what ``unevaluatedProperties`` and ``unevaluatedItems`` leave.

Which ones depends on the branches that a value takes, so each combination of branches becomes an alternative that names
its branches and closes the value after what they evaluate. A value that takes two branches of ``anyOf`` at once gets
the names of one of them: fewer values, never others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from attrs import frozen

from enginehouse_llguidance.schemas.document import REFERENCES, Document
from enginehouse_llguidance.schemas.negation import conjunction, disjunction, negated, same
from enginehouse_llguidance.schemas.problems import NotExpressible, join_pointer

__all__ = ["BRANCHING", "close_items", "close_properties"]

BRANCHING = frozenset({"allOf", "anyOf", "oneOf", "if", "dependentSchemas", "contains", *REFERENCES})
"""Keywords that evaluate members beside those of their own schema."""

_MAX_ALTERNATIVES = 64


@frozen
class _Evaluated:
    """Members and items that one combination of branches evaluates.

    Attributes:
        conditions: schemas that a value of this combination satisfies besides.
        num_items: number of items at the beginning.
    """

    conditions: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    has_all_properties: bool = False
    num_items: int = 0
    has_all_items: bool = False

    def joined(self, other: _Evaluated) -> _Evaluated:
        return _Evaluated(
            (*self.conditions, *other.conditions),
            (*self.names, *other.names),
            (*self.patterns, *other.patterns),
            self.has_all_properties or other.has_all_properties,
            max(self.num_items, other.num_items),
            self.has_all_items or other.has_all_items,
        )


def close_properties(document: Document, pointer: str) -> Any:
    """Return a schema that applies ``unevaluatedProperties`` of the schema at a pointer. Raises NotExpressible."""
    place = join_pointer(pointer, ["unevaluatedProperties"])
    rest = same(document, place)
    options = []
    for one in _found(document, pointer, place, is_outer=True):
        closing: Any = {
            "properties": dict.fromkeys(one.names, True),
            "patternProperties": dict.fromkeys(one.patterns, True),
            "additionalProperties": rest,
        }
        options.append(conjunction([*one.conditions, True if one.has_all_properties else closing]))
    return disjunction(options)


def close_items(document: Document, pointer: str) -> Any:
    """Return a schema that applies ``unevaluatedItems`` of the schema at a pointer. Raises NotExpressible."""
    place = join_pointer(pointer, ["unevaluatedItems"])
    rest = same(document, place)
    if "contains" in document.at(pointer):  # an item that it matches is evaluated
        rest = disjunction([same(document, join_pointer(pointer, ["contains"])), rest])
    options = []
    for one in _found(document, pointer, place, is_outer=True):
        closing: Any = {"prefixItems": [True] * one.num_items, "items": rest}
        options.append(conjunction([*one.conditions, True if one.has_all_items else closing]))
    return disjunction(options)


def _alternatives(document: Document, pointer: str, place: str) -> list[_Evaluated]:
    """Return what a schema at the same value evaluates."""
    return document.once("what is evaluated", pointer, lambda: _found(document, pointer, place, is_outer=False))


def _found(document: Document, pointer: str, place: str, *, is_outer: bool) -> list[_Evaluated]:
    schema = document.at(pointer)
    if not isinstance(schema, dict):
        return [_Evaluated()]
    groups = [[_own(schema, is_outer)], *_groups(document, pointer, schema, place)]
    found: list[_Evaluated] = []
    for combination in product(*groups):
        joined = _Evaluated()
        for one in combination:
            joined = joined.joined(one)
        found.append(joined)
        if len(found) > _MAX_ALTERNATIVES:
            raise NotExpressible(
                place, f"is not supported beside more than {_MAX_ALTERNATIVES} combinations of schemas"
            )
    return found


def _own(schema: dict[str, Any], is_outer: bool) -> _Evaluated:
    """Return what the keywords of a schema itself evaluate."""
    names, patterns, prefix = schema.get("properties"), schema.get("patternProperties"), schema.get("prefixItems")
    items = schema.get("items", False)
    by_list = len(items) if isinstance(items, list) else 0
    rest = {"additionalProperties", "additionalItems"} | (
        set() if is_outer else {"unevaluatedProperties", "unevaluatedItems"}
    )
    present = rest & schema.keys()
    return _Evaluated(
        names=tuple(names) if isinstance(names, dict) else (),
        patterns=tuple(patterns) if isinstance(patterns, dict) else (),
        has_all_properties=not present.isdisjoint({"additionalProperties", "unevaluatedProperties"}),
        num_items=max(by_list, len(prefix) if isinstance(prefix, list) else 0),
        has_all_items=("items" in schema and not isinstance(items, list))
        or "unevaluatedItems" in present
        or bool(by_list and "additionalItems" in present),
    )


def _groups(document: Document, pointer: str, schema: dict[str, Any], place: str) -> Iterator[list[_Evaluated]]:
    """Yield the alternatives of each schema that applies to the same value."""

    def of(where: str, *conditions: Any) -> list[_Evaluated]:
        given = _Evaluated(conditions=tuple(one for one in conditions if one is not True))
        return [given.joined(one) for one in _alternatives(document, where, place)]

    if any(key in schema for key in REFERENCES):
        yield of(document.target(schema, pointer)[0])
    for where in _list(schema, pointer, "allOf"):
        yield of(where)
    for key in ("anyOf", "oneOf"):
        options = [one for where in _list(schema, pointer, key) for one in of(where, same(document, where))]
        if options:
            yield options
    if "if" in schema:
        yield _conditional(document, pointer, schema, of)
    for name in schema.get("dependentSchemas", ()):
        where = join_pointer(pointer, ["dependentSchemas", name])
        absent = _Evaluated(conditions=({"properties": {name: False}},))
        yield [absent, *of(where, {"type": "object", "required": [name]})]


def _conditional(document: Document, pointer: str, schema: dict[str, Any], of: Any) -> list[_Evaluated]:
    condition = join_pointer(pointer, ["if"])
    holds: list[_Evaluated] = of(condition, same(document, condition))
    if "then" in schema:
        then: list[_Evaluated] = of(join_pointer(pointer, ["then"]))
        holds = [one.joined(other) for one in holds for other in then]
    other_case: list[_Evaluated] = [_Evaluated(conditions=(negated(document, condition),))]
    if "else" in schema:
        otherwise: list[_Evaluated] = of(join_pointer(pointer, ["else"]))
        other_case = [one.joined(other) for one in other_case for other in otherwise]
    return [*holds, *other_case]


def _list(schema: dict[str, Any], pointer: str, key: str) -> Iterable[str]:
    options = schema.get(key)
    return [join_pointer(pointer, [key, index]) for index in range(len(options))] if isinstance(options, list) else ()
