"""Object keywords. Objects whose schema is not combined are closed; free names may repeat, so they are not counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from enginehouse_llguidance.automata import AutomatonError, restricted
from enginehouse_llguidance.patterns import escape_text
from enginehouse_llguidance.schemas.document import REFERENCES, Document, Pointer
from enginehouse_llguidance.schemas.evaluated import BRANCHING
from enginehouse_llguidance.schemas.keywords import KEYWORDS
from enginehouse_llguidance.schemas.markers import CHECKED, UNIQUE_NAMES
from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import length, read_pattern, string_keywords

__all__ = ["Prepare", "absent_names", "counts_of_names", "is_closed_beside", "object_keywords"]

_MAX_CHOICES = 64
_PLAIN = "[\\x{20}-\\x{7e}]*"
_MAX_OVERLAPPING = 4
"""Maximum number of patterns of names that may overlap."""
_FURTHER = frozenset({*REFERENCES, "dependencies", "dependentRequired", "dependentSchemas", "minProperties"}) - {"$ref"}

Prepare = Callable[..., Any]
"""Prepares a subschema: ``prepare(value, *steps)``."""


def object_keywords(schema: dict[str, Any], place: Place, prepare: Prepare) -> dict[str, Any]:
    """Return the keywords that enforce the object keywords of ``schema``.

    Args:
        place: ``is_alone`` only if nothing besides these keywords restricts the properties.
        prepare: prepares subschemas.
    """
    keywords: dict[str, Any] = {}
    properties = _mapping(schema, "properties", place)
    if properties:
        keywords["properties"] = {name: prepare(value, "properties", name) for name, value in properties.items()}
    patterns = _mapping(schema, "patternProperties", place)
    required = _required(schema, place)
    if "additionalProperties" in schema:
        keywords["additionalProperties"] = prepare(schema["additionalProperties"], "additionalProperties")
    elif "unevaluatedProperties" in schema and BRANCHING.isdisjoint(schema):  # otherwise a derived schema closes it
        keywords["additionalProperties"] = prepare(schema["unevaluatedProperties"], "unevaluatedProperties")
    elif _suffices(schema, properties, patterns, required, place):
        keywords["additionalProperties"] = False
    if patterns:
        keywords["patternProperties"] = _pattern_properties(patterns, required, keywords, place, prepare)
    if schema.get("propertyNames", True) not in (True, {}):
        _restrict_names(schema, required, keywords, place)
    _counts(schema, keywords, required, place)
    if required:
        keywords["required"] = required
    return keywords


def is_closed_beside(document: Document, schema: dict[str, Any], derived: Iterable[Any], place: Place) -> bool:
    """Return True if an object needs no names besides its properties, although derived schemas apply to it as well."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not {"additionalProperties", "unevaluatedProperties"}.isdisjoint(schema):
        return False
    if not _suffices(schema, properties, schema.get("patternProperties", {}), _required(schema, place), place):
        return False
    waiting, seen = list(derived), set()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one.get("$ref"), Pointer):
            one = document.at(one["$ref"])
        if not isinstance(one, dict):
            continue
        if "$ref" in one or not _FURTHER.isdisjoint(one):
            return False
        names = {*one.get("properties", ()), *one.get("required", ())}
        if not names <= properties.keys():
            return False
        for key in ("allOf", "anyOf", "oneOf"):
            waiting.extend(one.get(key, ()))
        waiting.extend(one[key] for key in ("not", "if", "then", "else") if key in one)
    return True


def _mapping(schema: dict[str, Any], key: str, place: Place) -> dict[str, Any]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        raise SchemaProblem(place.at(key), "must be an object")
    return value


def _required(schema: dict[str, Any], place: Place) -> list[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SchemaProblem(place.at("required"), "must be a list of strings")
    return list(dict.fromkeys(names))


def _suffices(
    schema: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any], required: list[str], place: Place
) -> bool:
    """True if an object's schema is not combined and needs no further names; then none are allowed."""
    if not place.is_alone or not (properties or patterns) or any(name not in properties for name in required):
        return False
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    return bool(patterns) or low <= len(properties)


def _pattern_properties(
    patterns: dict[str, Any], required: list[str], keywords: dict[str, Any], place: Place, prepare: Prepare
) -> dict[str, Any]:
    prepared, depends, properties = {}, None, keywords.get("properties", {})
    for pattern, value in patterns.items():
        pointer = place.at("patternProperties", pattern)
        if not pattern:
            raise SchemaProblem(pointer, "an empty pattern matches every name; use additionalProperties")
        translated = read_pattern(pattern, pointer)
        if translated.is_finite and (properties or required or not place.is_alone):
            # The library offers a further name even if all are taken.
            raise SchemaProblem(pointer, "matches a few names only; list them in properties instead")
        prepared[f"^(?:{translated.regex})$"] = prepare(value, "patternProperties", pattern)
        depends = depends or (pointer if translated.depends_on_dialect else None)
    is_plain = all(name.isascii() and name.isprintable() for name in (*properties, *required))
    if depends and not (is_plain and len(patterns) == 1 and keywords.get("additionalProperties") is False):
        if not is_plain:
            message = "what classes, '.' and '$' match depends on the dialect beyond ASCII; use sets such as [0-9]"
            raise SchemaProblem(depends, message)
        prepared = _plain(prepared, properties, keywords, depends)
    return _disjoint(prepared)


def _plain(
    prepared: dict[str, Any], properties: dict[str, Any], keywords: dict[str, Any], pointer: str
) -> dict[str, Any]:
    """Restrict names to ASCII, on which dialects agree: those of each pattern, and those that no pattern matches."""
    bodies = {pattern: pattern.removeprefix("^").removesuffix("$") for pattern in prepared}
    rest = keywords.get("additionalProperties", True)
    try:
        found = {f"^{restricted(_PLAIN, [(bodies[one], False)])}$": value for one, value in prepared.items()}
        if rest is not False:
            others = [*bodies.values(), *map(escape_text, properties)]
            found[f"^{restricted(_PLAIN, [(other, True) for other in others])}$"] = rest
    except AutomatonError as error:
        raise SchemaProblem(pointer, f"is not supported beside so many names: {error}") from error
    keywords["additionalProperties"] = False
    return found


def _disjoint(prepared: dict[str, Any]) -> dict[str, Any]:
    """Return patterns of which a name matches at most one: for each combination that some name matches."""
    if len(prepared) < 2 or len(prepared) > _MAX_OVERLAPPING:
        return prepared
    bodies = {pattern: pattern.removeprefix("^").removesuffix("$") for pattern in prepared}
    if not any(_both(bodies[one], [(bodies[other], False)]) for one, other in combinations(prepared, 2)):
        return prepared
    found: dict[str, Any] = {}
    for chosen in (chosen for size in range(1, len(prepared) + 1) for chosen in combinations(prepared, size)):
        first, *others = chosen
        conditions = [(bodies[one], False) for one in others]
        conditions += [(bodies[one], True) for one in prepared if one not in chosen]
        if (body := _both(bodies[first], conditions)) is not None:
            values = [prepared[one] for one in chosen if prepared[one] is not True and prepared[one] != {}]
            found[f"^(?:{body})$"] = values[0] if len(values) == 1 else {"allOf": values} if values else True
    return found


def _both(body: str, conditions: list[tuple[str, bool]]) -> str | None:
    """Return an expression for what matches all; None if nothing does, or it is too large to tell."""
    try:
        return restricted(body, conditions)
    except AutomatonError:
        return None


def _restrict_names(schema: dict[str, Any], required: list[str], keywords: dict[str, Any], place: Place) -> None:
    """Rewrite ``propertyNames`` as the only pattern that names may match, or as a list of names."""
    pointer, names = place.at("propertyNames"), schema["propertyNames"]
    if names is False:
        keywords["maxProperties"] = 0
        return
    if not isinstance(names, dict):
        raise SchemaProblem(pointer, "a schema must be an object, true or false")
    if "string" not in ([names["type"]] if isinstance(names.get("type"), str) else names.get("type", ["string"])):
        keywords["maxProperties"] = 0  # names are strings
        return
    asked = {key for key in names if key != "type" and getattr(KEYWORDS.get(key), "status", "annotation") == "enforced"}
    if not asked:
        return
    if asked <= {"enum", "const"}:
        allowed = names["enum"] if "enum" in names else [names["const"]]
        if not isinstance(allowed, list):
            raise SchemaProblem(join_pointer(pointer, ["enum"]), "must be a list with at least one value")
        listed = dict.fromkeys(name for name in allowed if isinstance(name, str))
        _only_names(listed, schema, keywords, place)
    elif asked <= {"pattern", "format", "minLength", "maxLength"} and not required:
        if "properties" in keywords or "patternProperties" in keywords:
            raise SchemaProblem(pointer, "is not supported together with properties and patternProperties")
        keywords["patternProperties"] = {_pattern_of_names(names, pointer): keywords.get("additionalProperties", True)}
    else:
        message = "is only supported as enum, const, or without required as pattern, format and lengths"
        raise SchemaProblem(pointer, message)
    keywords["additionalProperties"] = False


def _only_names(listed: dict[str, None], schema: dict[str, Any], keywords: dict[str, Any], place: Place) -> None:
    if "patternProperties" in keywords:
        raise SchemaProblem(place.at("propertyNames"), "is not supported together with patternProperties")
    properties, value = keywords.get("properties", {}), keywords.get("additionalProperties", True)
    is_given = not {"additionalProperties", "unevaluatedProperties"}.isdisjoint(schema)
    if place.is_alone and properties and not is_given:
        value = True  # the names are listed here, not in properties
    keywords["properties"] = {name: properties.get(name, value) for name in listed} | {
        name: False for name in properties if name not in listed
    }


def _pattern_of_names(names: dict[str, Any], pointer: str) -> str:
    found = string_keywords(names, pointer)
    lengths = f"(?s:.){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}"
    patterns = [found["pattern"], *(part["pattern"] for part in found.get("allOf", ()))] if "pattern" in found else []
    if {"minLength", "maxLength"} & found.keys() or not patterns:
        patterns.append(f"^{lengths}$")
    if len(patterns) == 1:
        return str(patterns[0])
    whole = [pattern.removeprefix("^").removesuffix("$") for pattern in patterns]
    try:
        return f"^{restricted(whole[0], [(pattern, False) for pattern in whole[1:]])}$"
    except AutomatonError as error:
        raise SchemaProblem(pointer, f"its conditions are not supported together: {error}") from error


def _counts(schema: dict[str, Any], keywords: dict[str, Any], required: list[str], place: Place) -> None:
    """Enforce ``minProperties`` and ``maxProperties`` unless a derived schema does; free names then differ."""
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    high = length(schema, "maxProperties", place.pointer) if "maxProperties" in schema else None
    properties = keywords.get("properties", {})
    is_free = not properties and not required
    is_closed = keywords.get("additionalProperties") is False and "patternProperties" not in keywords
    if is_closed and low == len(properties) > 0:
        required += [name for name in properties if name not in required]
    if low > len(required) and not counts_of_names(schema, low):
        if low > 1 and not is_free:
            keywords[CHECKED] = place.at("minProperties")
        else:
            keywords["minProperties"] = low
    if high is not None and not (is_closed and high >= len(properties)):
        is_explicit = schema.get("additionalProperties") is False and "patternProperties" not in schema
        is_derived = is_explicit and bool(absent_names(schema, high))
        if is_closed and high > 1 and not is_derived:
            keywords[CHECKED] = place.at("maxProperties")
        elif not is_derived:
            keywords["maxProperties"] = high
    if keywords.get("minProperties", 0) > 1:
        keywords[UNIQUE_NAMES] = True


def counts_of_names(schema: dict[str, Any], low: int) -> list[tuple[str, ...]]:
    """Return the choices of so many properties; none if they do not suffice, or are too many."""
    return _choices(schema, low) if low > 1 else []


def absent_names(schema: dict[str, Any], high: int) -> list[tuple[str, ...]]:
    """Return the choices of properties that are absent if there are at most so many."""
    properties = schema.get("properties")
    return _choices(schema, len(properties) - high) if isinstance(properties, dict) and high > 1 else []


def _choices(schema: dict[str, Any], count: int) -> list[tuple[str, ...]]:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not 0 < count <= len(properties):
        return []
    return list(combinations(properties, count)) if math.comb(len(properties), count) <= _MAX_CHOICES else []
