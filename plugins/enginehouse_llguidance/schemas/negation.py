"""The complement of a schema, as a schema: for ``not``, ``if`` and ``oneOf``.

A schema is the conjunction of its keywords, so its complement is the disjunction of their complements, each of them for
the one type that the keyword speaks of. A keyword without an expressible complement is left out of the disjunction,
which then allows fewer values; a schema of such keywords only has no complement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any, TypeVar

from enginehouse_llguidance.formats import FOREIGN_TEXTS, STRING_FORMATS
from enginehouse_llguidance.schemas.document import COMPLEX, REFERENCES, Document, Pointer
from enginehouse_llguidance.schemas.numbers import NUMBER_FORMATS, is_finite, is_number
from enginehouse_llguidance.schemas.problems import NotExpressible, SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import read_pattern

__all__ = ["conjunction", "disjunction", "negated", "same"]

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_Key = TypeVar("_Key")
_SYNTAX = frozenset("\\^$.|?*+()[]{}/")


def same(document: Document, pointer: str) -> Any:
    """Return a schema with the meaning of the one at a pointer, for any place."""
    value = document.at(pointer)
    return value if not isinstance(value, dict) or COMPLEX.isdisjoint(value) else {"$ref": Pointer(pointer)}


def conjunction(schemas: list[Any]) -> Any:
    """Return a schema for the values that satisfy all of these."""
    kept = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def disjunction(schemas: list[Any]) -> Any:
    """Return a schema for the values that satisfy any of these."""
    kept = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in kept):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else {"anyOf": kept}


def negated(document: Document, pointer: str) -> Any:
    """Return a schema for values that do not satisfy the one at a pointer.

    Raises:
        NotExpressible: it has no expressible complement.
        SchemaProblem: it is malformed.
    """
    return document.once("the complement", pointer, lambda: _negated(document, pointer))


def _negated(document: Document, pointer: str) -> Any:
    schema = document.at(pointer)
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise SchemaProblem(pointer, "a schema must be an object, true or false")
    options: list[Any] = []
    lost: list[str] = []
    for key in schema:
        if key in _RULES:
            try:
                options += _RULES[key](document, pointer, schema)
            except SchemaProblem:
                lost.append(key)
            except (AttributeError, KeyError, TypeError) as error:
                raise SchemaProblem(join_pointer(pointer, [key]), "is malformed") from error
        elif key in _WITHOUT_COMPLEMENT:
            lost.append(key)
    found = disjunction(options)
    if found is False and lost:
        raise NotExpressible(pointer, f"the complement of {', '.join(lost)} is not supported (for not, if and oneOf)")
    return found


_WITHOUT_COMPLEMENT = {
    *("additionalItems", "additionalProperties", "multipleOf", "patternProperties", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
}

_Rule = Callable[[Document, str, dict[str, Any]], list[Any]]


def _type(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    named = schema["type"]
    names = {named} if isinstance(named, str) else set(named)
    if "integer" in names:
        names.add("number")  # no grammar for numbers other than integers
    return [{"type": name} for name in _TYPES if name not in names]


def _constants(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    """Everything but a list of values; of arrays and objects, only other types if one is listed."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        raise SchemaProblem(join_pointer(pointer, ["enum"]), "must be a list with at least one value")
    options: list[Any] = []
    if None not in values:
        options.append({"type": "null"})
    options += [{"const": value} for value in (True, False) if not any(one is value for one in values)]
    options += _other_numbers([value for value in values if is_number(value)])
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        options.append({"type": "string", "pattern": f"^(?!(?:{'|'.join(map(_escaped, texts))})$)"})
    else:
        options.append({"type": "string"})
    if not (arrays := [value for value in values if isinstance(value, list)]):
        options.append({"type": "array"})
    elif arrays == [[]]:
        options.append({"type": "array", "minItems": 1})
    if not (objects := [value for value in values if isinstance(value, dict)]):
        options.append({"type": "object"})
    elif objects == [{}]:
        options.append({"type": "object", "minProperties": 1})
    return options


def _other_numbers(values: list[Any]) -> list[Any]:
    if not values:
        return [{"type": "number"}]
    found = sorted(set(values))
    between = [{"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(found)]
    ends = [{"type": "number", "exclusiveMaximum": found[0]}, {"type": "number", "exclusiveMinimum": found[-1]}]
    return [*ends, *between]


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in _SYNTAX else char for char in text)


def _pattern(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    pattern = schema["pattern"]
    if not isinstance(pattern, str):
        raise SchemaProblem(join_pointer(pointer, ["pattern"]), "must be a string")
    other = f"^(?![\\s\\S]*(?:{pattern}))"
    place = join_pointer(pointer, ["pattern"])
    read_pattern(pattern, place)
    if not read_pattern(other, place).is_exact:
        raise NotExpressible(place, "has no expressible complement")
    return [{"type": "string", "pattern": other}]


def _format(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    name = schema["format"]
    if name in FOREIGN_TEXTS:
        return [{"type": "string", "pattern": FOREIGN_TEXTS[name]}]
    if name in STRING_FORMATS or name in NUMBER_FORMATS:
        raise NotExpressible(join_pointer(pointer, ["format"]), "has no expressible complement")
    return []  # an annotation


def _bound(kind: str, other: str) -> _Rule:
    return lambda document, pointer, schema: [{"type": "number", other: schema[kind]}]


def _fewer(kind: str, other: str, of_type: str) -> _Rule:
    """The complement of a lower limit is an upper one below it."""

    def rule(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
        limit = _count(schema[kind], join_pointer(pointer, [kind]))
        return [{"type": of_type, other: limit - 1}] if limit > 0 else []

    return rule


def _more(kind: str, other: str, of_type: str) -> _Rule:
    def rule(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
        return [{"type": of_type, other: _count(schema[kind], join_pointer(pointer, [kind])) + 1}]

    return rule


def _count(value: Any, pointer: str) -> int:
    if not is_number(value) or not is_finite(value) or value != int(value) or value < 0:
        raise SchemaProblem(pointer, "must be a whole number of at least 0")
    return int(value)


def _required(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [{"type": "object", "properties": {name: False}} for name in schema["required"]]


def _properties(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    places = {name: join_pointer(pointer, ["properties", name]) for name in schema["properties"]}
    return [
        {"type": "object", "properties": {name: other}, "required": [name]}
        for name, other in _complements(document, places)
    ]


def _prefix(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    key = "prefixItems" if "prefixItems" in schema else "items"
    places = {index: join_pointer(pointer, [key, index]) for index in range(len(schema[key]))}
    return [
        {"type": "array", "prefixItems": [*[True] * index, other], "minItems": index + 1}
        for index, other in _complements(document, places)
    ]


def _complements(document: Document, places: dict[_Key, str]) -> Iterator[tuple[_Key, Any]]:
    """Yield the complements of those schemas that have one; raises SchemaProblem if there are others only."""
    problem, is_any = None, False
    for key, place in places.items():
        try:
            other = negated(document, place)
        except SchemaProblem as error:
            problem = error
            continue
        is_any = True
        if other is not False:
            yield key, other
    if problem is not None and not is_any:
        raise problem


def _items(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    """A wrong item is only written as the first one."""
    if isinstance(schema["items"], list):
        return [] if "prefixItems" in schema else _prefix(document, pointer, schema)
    index = len(schema.get("prefixItems", ()))
    other = negated(document, join_pointer(pointer, ["items"]))
    if other is False:
        return []
    return [{"type": "array", "prefixItems": [*[True] * index, other], "minItems": index + 1}]


def _contains(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    if schema.get("minContains", 1) != 1 or "maxContains" in schema:
        raise NotExpressible(join_pointer(pointer, ["contains"]), "has no expressible complement with these bounds")
    return [{"type": "array", "items": negated(document, join_pointer(pointer, ["contains"]))}]


def _all_of(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [negated(document, place) for place in _places(pointer, schema, "allOf")]


def _any_of(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [conjunction([negated(document, place) for place in _places(pointer, schema, "anyOf")])]


def _one_of(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    """None of them, or two."""
    places = _places(pointer, schema, "oneOf")
    pairs = [conjunction([same(document, one) for one in two]) for two in combinations(places[:8], 2)]
    return [conjunction([negated(document, place) for place in places]), *pairs]


def _not(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [same(document, join_pointer(pointer, ["not"]))]


def _if(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    found = []
    if "then" in schema:
        wrong = negated(document, join_pointer(pointer, ["then"]))
        found.append(conjunction([same(document, join_pointer(pointer, ["if"])), wrong]))
    if "else" in schema:
        wrong = negated(document, join_pointer(pointer, ["else"]))
        found.append(conjunction([negated(document, join_pointer(pointer, ["if"])), wrong]))
    return found


def _dependent_required(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [
        {"type": "object", "required": [name], "properties": {missing: False}}
        for name, names in schema["dependentRequired"].items()
        for missing in names
        if missing != name
    ]


def _dependent_schemas(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [
        conjunction(
            [
                {"type": "object", "required": [name]},
                negated(document, join_pointer(pointer, ["dependentSchemas", name])),
            ]
        )
        for name in schema["dependentSchemas"]
    ]


def _reference(document: Document, pointer: str, schema: dict[str, Any]) -> list[Any]:
    return [negated(document, document.target(schema, pointer)[0])]


def _places(pointer: str, schema: dict[str, Any], key: str) -> list[str]:
    if not isinstance(schema[key], list) or not schema[key]:
        raise SchemaProblem(join_pointer(pointer, [key]), "must be a list with at least one schema")
    return [join_pointer(pointer, [key, index]) for index in range(len(schema[key]))]


_RULES: dict[str, _Rule] = {
    "type": _type,
    "enum": _constants,
    "const": _constants,
    "minimum": _bound("minimum", "exclusiveMaximum"),
    "maximum": _bound("maximum", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("exclusiveMinimum", "maximum"),
    "exclusiveMaximum": _bound("exclusiveMaximum", "minimum"),
    "minLength": _fewer("minLength", "maxLength", "string"),
    "maxLength": _more("maxLength", "minLength", "string"),
    "pattern": _pattern,
    "format": _format,
    "minItems": _fewer("minItems", "maxItems", "array"),
    "maxItems": _more("maxItems", "minItems", "array"),
    "prefixItems": _prefix,
    "items": _items,
    "contains": _contains,
    "minProperties": _fewer("minProperties", "maxProperties", "object"),
    "maxProperties": _more("maxProperties", "minProperties", "object"),
    "required": _required,
    "properties": _properties,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(REFERENCES, _reference),
}
