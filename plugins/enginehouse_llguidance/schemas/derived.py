"""Keywords that others express: ``not``, ``if``, dependencies, ``contains``, unevaluated members, ``oneOf``.

Each becomes a schema that applies to the same value besides. It refers to the request's subschemas by pointer. What has
no such schema, or too large a one, is loosened: the grammar then allows more, and values are checked when complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from typing import Any

from enginehouse_llguidance.schemas.counted import absent_names, counts_of_names
from enginehouse_llguidance.schemas.disjoint import ObjectNames, find_overlaps, names_of
from enginehouse_llguidance.schemas.document import Document
from enginehouse_llguidance.schemas.evaluated import BRANCHING, close_items, close_properties
from enginehouse_llguidance.schemas.keywords import TYPES, is_enforced
from enginehouse_llguidance.schemas.negation import conjunction, disjunction, negated, same
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import length

__all__ = ["derived_schemas", "exclusive_conditions", "exclusive_options", "without"]

_NUM_PLACES = 8  # of the first item that ``contains`` asks for
_NUM_COUNTED = 4  # items at the beginning among which the number of contained ones is settled
_MAX_FIRST = 1000  # items that are all asked for
_MAX_OPTIONS = 12
_MIN_CONDITIONS = 3


def derived_schemas(
    document: Document, schema: dict[str, Any], pointer: str
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each keyword of the schema at a pointer that others express, and a function that returns their schema.

    The functions raise NotExpressible if they cannot, or SchemaProblem if the keyword is malformed.
    """
    if "not" in schema:
        yield "not", partial(negated, document, join_pointer(pointer, ["not"]))
    if "if" in schema:
        yield "if", partial(_conditional, document, schema, pointer)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if key in schema:
            yield key, partial(_dependencies, document, schema[key], join_pointer(pointer, [key]))
    if "minProperties" in schema and (chosen := counts_of_names(schema, length(schema, "minProperties", pointer))):
        yield "minProperties", partial(disjunction, [{"required": list(names)} for names in chosen])
    if "maxProperties" in schema and schema.get("additionalProperties") is False and "patternProperties" not in schema:
        chosen = absent_names(schema, length(schema, "maxProperties", pointer))
        if chosen:
            yield "maxProperties", partial(disjunction, [{"properties": dict.fromkeys(one, False)} for one in chosen])
    if "contains" in schema:
        yield "contains", partial(_contains, document, schema, pointer)
    beside = not BRANCHING.isdisjoint(schema)
    if "unevaluatedProperties" in schema and (beside or "additionalProperties" in schema):
        yield "unevaluatedProperties", partial(close_properties, document, pointer)
    if "unevaluatedItems" in schema and (beside or "items" in schema):
        yield "unevaluatedItems", partial(close_items, document, pointer)


def without(document: Document, schema: dict[str, Any], pointer: str, key: str) -> Any:
    """Return what the grammar says instead of a keyword of the schema at a pointer, and values may be checked for."""
    if key == "if":
        return disjunction([_branch(document, schema, pointer, "then"), _branch(document, schema, pointer, "else")])
    if key == "contains":
        return {"minItems": length(schema, "minContains", pointer) if "minContains" in schema else 1}
    return True


def exclusive_options(document: Document, schema: dict[str, Any], pointer: str) -> list[Any] | None:
    """Return schemas of which any one may hold, instead of ``oneOf``; None if its options exclude each other.

    Raises:
        NotExpressible: some may overlap and have no complement.
    """
    options = schema["oneOf"]
    place = join_pointer(pointer, ["oneOf"])
    overlaps = find_overlaps(document, options, schema)
    if not overlaps:
        return None
    names = [names_of(document, option) for option in options]
    if len(options) > _MAX_OPTIONS:
        first = next(iter(overlaps))
        message = f"more than {_MAX_OPTIONS} schemas are only supported where no value matches two of them; {first} may"
        raise NotExpressible(place, f"{message} overlap")
    places = [join_pointer(place, [index]) for index in range(len(options))]
    found = []
    for index, one in enumerate(places):
        others = [other for other in range(len(options)) if (min(index, other), max(index, other)) in overlaps]
        try:
            excluded = [_excluded(document, places[other], names[index], names[other]) for other in others]
            found.append(conjunction([same(document, one), *excluded]))
        except NotExpressible as error:
            pair = (min(index, others[0]), max(index, others[0]))
            raise NotExpressible(place, f"a value may match two of the schemas, {pair}, and {error}") from error
    return found


def exclusive_conditions(document: Document, schema: dict[str, Any], pointer: str) -> tuple[list[int], Any]:
    """Return the indexes of members of ``allOf`` with conditions that exclude each other, and a schema for them: one
    alternative for each, where the product of their own ones would be too large.

    Such are the forms of an object that has its kind in a property. Nothing is returned if there are fewer than three.
    """
    members = schema["allOf"] if isinstance(schema["allOf"], list) else []
    found = [index for index, one in enumerate(members) if isinstance(one, dict) and _is_conditional(one)]
    if len(found) < _MIN_CONDITIONS:
        return [], True
    parent = {key: value for key, value in schema.items() if key != "allOf"}
    if find_overlaps(document, [members[index]["if"] for index in found], parent):
        return [], True
    places = [join_pointer(pointer, ["allOf", index]) for index in found]
    conditions = [join_pointer(place, ["if"]) for place in places]
    try:
        others = conjunction([negated(document, condition) for condition in conditions])
    except NotExpressible:
        return [], True
    cases = [
        conjunction([same(document, condition), _branch(document, members[index], place, "then")])
        for index, place, condition in zip(found, places, conditions, strict=True)
    ]
    return found, disjunction([*cases, others])


def _is_conditional(schema: dict[str, Any]) -> bool:
    return "$id" not in schema and {key for key in schema if is_enforced(key)} == {"if", "then"}


def _excluded(document: Document, pointer: str, own: ObjectNames, of_other: ObjectNames) -> Any:
    """Return a schema for what does not satisfy another option, as having a property that the other has not."""
    further = [name for name in own.names if name not in of_other.names] if of_other.is_closed else []
    having = [{"type": "object", "required": [name]} for name in further]
    try:
        return disjunction([*having, negated(document, pointer)])
    except NotExpressible:
        if not having:
            raise
        return disjunction(having)


def _conditional(document: Document, schema: dict[str, Any], pointer: str) -> Any:
    if {"then", "else"}.isdisjoint(schema):
        return True
    condition = join_pointer(pointer, ["if"])
    return disjunction(
        [
            conjunction([same(document, condition), _branch(document, schema, pointer, "then")]),
            conjunction([negated(document, condition), _branch(document, schema, pointer, "else")]),
        ]
    )


def _branch(document: Document, schema: dict[str, Any], pointer: str, key: str) -> Any:
    return same(document, join_pointer(pointer, [key])) if key in schema else True


def _dependencies(document: Document, value: Any, pointer: str) -> Any:
    if not isinstance(value, dict):
        raise SchemaProblem(pointer, "must be an object")
    asked = []
    for name, needed in value.items():
        place = join_pointer(pointer, [name])
        if isinstance(needed, list):
            if not all(isinstance(one, str) for one in needed):
                raise SchemaProblem(place, "must be a list of strings")
            with_it: Any = {"required": [name, *needed]}
        elif isinstance(needed, str):  # of draft 3
            with_it = {"required": [name, needed]}
        else:
            with_it = conjunction([{"required": [name]}, same(document, place)])
        asked.append(disjunction([{"properties": {name: False}}, with_it]))
    return conjunction(asked)


def _contains(document: Document, schema: dict[str, Any], pointer: str) -> Any:
    """Return alternatives for the places of the contained items, among the first ones."""
    low = length(schema, "minContains", pointer) if "minContains" in schema else 1
    high = length(schema, "maxContains", pointer) if "maxContains" in schema else None
    place = join_pointer(pointer, ["contains"])
    wanted = same(document, place)
    if low > _MAX_FIRST:
        raise NotExpressible(join_pointer(pointer, ["minContains"]), f"more than {_MAX_FIRST} is not supported")
    if high is None:
        if low > _NUM_PLACES:
            return {"prefixItems": [wanted] * low, "minItems": low}
        if low == 0:
            return True
        chosen = combinations(range(_NUM_PLACES), low) if low == 1 else combinations(range(low + 2), low)
        return disjunction(
            [
                {"prefixItems": [wanted if at in one else True for at in range(one[-1] + 1)], "minItems": one[-1] + 1}
                for one in chosen
            ]
        )
    if low > high:
        return {"type": [name for name in TYPES if name != "array"]}
    other = negated(document, place)
    if low > _NUM_COUNTED:
        return {"prefixItems": [wanted] * low, "items": other, "minItems": low}
    options: list[Any] = []
    for row in product((False, True), repeat=_NUM_COUNTED):
        if low <= sum(row) <= high:
            last = max((at + 1 for at, is_wanted in enumerate(row) if is_wanted), default=0)
            shown = {"prefixItems": [wanted if one else other for one in row[:last]], "items": other, "minItems": last}
            options.append(shown)
    return disjunction([option for index, option in enumerate(options) if option not in options[:index]])
