"""Object keywords. Objects whose schema is not combined are closed; free names may repeat, so they are not counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import combinations
from typing import Any

from enginehouse_llguidance.automata import AutomatonError, Expression, NothingMatches, restricted
from enginehouse_llguidance.patterns import escape_text
from enginehouse_llguidance.schemas.document import REFERENCES, Document, Pointer
from enginehouse_llguidance.schemas.evaluated import BRANCHING
from enginehouse_llguidance.schemas.keywords import KEYWORDS
from enginehouse_llguidance.schemas.markers import CHECKED, UNIQUE_NAMES
from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer
from enginehouse_llguidance.schemas.strings import length, read_pattern, string_keywords
from enginehouse_llguidance.schemas.texts import Texts, in_ascii

__all__ = ["Prepare", "absent_names", "counts_of_names", "is_closed_beside", "object_keywords"]

_MAX_CHOICES = 64
_LISTING = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$", re.ASCII)  # a pattern that lists names
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
    if properties or required or not place.is_alone:
        patterns = _without_listing(patterns, keywords, prepare)
    if patterns:
        is_rest_given = "additionalProperties" in schema
        found = _pattern_properties(patterns, required, keywords, place, prepare, is_rest_given=is_rest_given)
        keywords["patternProperties"] = found
    if schema.get("propertyNames", True) not in (True, {}):
        _restrict_names(schema, required, keywords, place, prepare)
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


def _without_listing(patterns: dict[str, Any], keywords: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
    """Return the patterns other than such as ``^(a|b)$``, whose names become properties: the library offers a further
    name even if all of a pattern are taken. In Python, the end also matches before a final line break.
    """
    listing = {pattern: found for pattern in patterns if (found := _LISTING.fullmatch(pattern))}
    is_open = keywords.get("additionalProperties") is not False or len(listing) < len(patterns)
    for pattern, found in listing.items():
        value = prepare(patterns[pattern], "patternProperties", pattern)
        properties = keywords.setdefault("properties", {})
        for name in (found[1] or found[2]).split("|"):
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value
            if is_open or f"{name}\n" in properties:
                properties[f"{name}\n"] = False
    return {pattern: value for pattern, value in patterns.items() if pattern not in listing}


def _pattern_properties(
    patterns: dict[str, Any],
    required: list[str],
    keywords: dict[str, Any],
    place: Place,
    prepare: Prepare,
    *,
    is_rest_given: bool,
) -> dict[str, Any]:
    prepared: dict[str, Any] = {}
    values: list[Any] = []
    depends, properties = None, keywords.get("properties", {})
    for pattern, value in patterns.items():
        pointer = place.at("patternProperties", pattern)
        if not pattern and is_rest_given:
            raise SchemaProblem(
                pointer, "validators differ on an empty pattern beside additionalProperties; leave it out"
            )
        translated = read_pattern(pattern, pointer)
        if translated.is_finite and not (place.is_alone and _has_others(translated.regex, (*properties, *required))):
            # The library offers a further name even if all are taken.
            raise SchemaProblem(pointer, "matches a finite number of names; list them in properties instead")
        values.append(prepare(value, "patternProperties", pattern))
        _add(prepared, f"^(?:{translated.regex})$", values[-1])
        depends = depends or (pointer if translated.depends_on_dialect else None)
    names = dict.fromkeys(name for name in (*properties, *required) if properties.get(name) is not False)
    others = [name for name in names if not (name.isascii() and name.isprintable())]
    if depends and (others or len(patterns) > 1 or keywords.get("additionalProperties") is not False):
        for name in others:
            keywords.setdefault("properties", {})[name] = _of_name(name, patterns, values, keywords, depends)
        prepared = _plain(prepared, keywords.get("properties", {}), keywords, depends)
    return _disjoint(prepared)


def _add(found: dict[str, Any], pattern: str, value: Any) -> None:
    """Add what a pattern asks for, which may be the same as an earlier one in another form."""
    found[pattern] = {"allOf": [found[pattern], value]} if pattern in found else value


def _has_others(body: str, names: Iterable[str]) -> bool:
    """Return True if an expression matches others than some names, or if there are none."""
    conditions = [(escape_text(name), True) for name in names]
    return not conditions or _both(body, conditions) is not None


def _of_name(name: str, patterns: Iterable[str], values: list[Any], keywords: dict[str, Any], pointer: str) -> Any:
    """Return the schema of a property beside patterns that are restricted to ASCII; False if dialects disagree."""
    texts = Texts()
    try:
        found = [texts.matches(pattern, name) for pattern in patterns]
    except AutomatonError as error:
        raise SchemaProblem(pointer, f"is not supported beside other names: {error}") from error
    if None in found:
        return False
    asked = [value for value, is_found in zip(values, found, strict=True) if is_found]
    if name in keywords.get("properties", ()):
        return {"allOf": [keywords["properties"][name], *asked]}
    return {"allOf": asked} if asked else keywords.get("additionalProperties", True)


def _plain(
    prepared: dict[str, Any], properties: dict[str, Any], keywords: dict[str, Any], pointer: str
) -> dict[str, Any]:
    """Restrict names to ASCII, on which dialects agree: those of each pattern, and those that no pattern matches."""
    bodies = {pattern: in_ascii(pattern.removeprefix("^").removesuffix("$")) for pattern in prepared}
    rest = keywords.get("additionalProperties", True)
    asked = [(_PLAIN, [(bodies[one], False)], value) for one, value in prepared.items()]
    if rest is not False:
        asked.append((_PLAIN, [(other, True) for other in (*bodies.values(), *map(escape_text, properties))], rest))
    found: dict[str, Any] = {}
    for body, conditions, value in asked:
        try:
            _add(found, f"^{restricted(body, conditions)}$", value)
        except NothingMatches:
            pass  # such names have other characters
        except AutomatonError as error:
            raise SchemaProblem(pointer, f"is not supported beside other names: {error}") from error
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


def _restrict_names(
    schema: dict[str, Any], required: list[str], keywords: dict[str, Any], place: Place, prepare: Prepare
) -> None:
    """Rewrite ``propertyNames`` as the only pattern that names may match, or as a list; others are checked."""
    pointer, names = place.at("propertyNames"), schema["propertyNames"]
    if names is False:
        _allow_no_names(keywords)
        return
    if not isinstance(names, dict):
        raise SchemaProblem(pointer, "a schema must be an object, true or false")
    if "string" not in ([names["type"]] if isinstance(names.get("type"), str) else names.get("type", ["string"])):
        _allow_no_names(keywords)  # names are strings
        return
    asked = _asked(names)
    if not asked:
        return
    if asked <= {"enum", "const"} and "patternProperties" not in keywords:
        _only_names(_listed(names, pointer), schema, keywords, place)
        keywords["additionalProperties"] = False
        return
    try:
        body = _body_of_names(names, asked, pointer)
        if body is not None:
            _only_matching(body, required, keywords)
            return
    except NothingMatches:
        _allow_no_names(keywords)
        return
    except AutomatonError:
        pass
    prepare(names, "propertyNames")
    keywords[CHECKED] = pointer


def _allow_no_names(keywords: dict[str, Any]) -> None:
    keywords |= {"properties": {}, "patternProperties": {}, "additionalProperties": False}


def _listed(names: dict[str, Any], pointer: str) -> dict[str, None]:
    allowed = names["enum"] if "enum" in names else [names["const"]]
    if not isinstance(allowed, list):
        raise SchemaProblem(join_pointer(pointer, ["enum"]), "must be a list with at least one value")
    return dict.fromkeys(name for name in allowed if isinstance(name, str) and names.get("const", name) == name)


def _body_of_names(names: Any, asked: set[str], pointer: str) -> str | None:
    """Return an expression for all of a name; None if the schema has other keywords.

    Raises:
        NothingMatches: no name satisfies it.
        AutomatonError: the expressions are too large to be combined.
    """
    if not asked or not asked <= {"anyOf", "enum", "const", "pattern", "format", "minLength", "maxLength"}:
        return None
    parts = []
    if not asked.isdisjoint({"enum", "const"}):
        listed = _listed(names, pointer)
        if not listed:
            raise NothingMatches("no name is listed")
        parts.append(f"(?:{'|'.join(map(escape_text, listed))})")
    if "anyOf" in asked:
        options = names["anyOf"] if isinstance(names["anyOf"], list) else []
        bodies: list[str | None] = []
        for one in options:
            with suppress(NothingMatches):
                bodies.append(_body_of_names(one, _asked(one), pointer))
        if not bodies or None in bodies:
            return None
        parts.append(f"(?:{'|'.join(map(str, bodies))})")
    found = string_keywords(names, pointer)
    for part in (found, *found.get("allOf", ())):
        if "pattern" in part:
            parts.append(part["pattern"].removeprefix("^").removesuffix("$"))
    if found.get("minLength", 0) > found.get("maxLength", math.inf):
        raise NothingMatches("no name has such a length")
    if {"minLength", "maxLength"} & found.keys() or not parts:
        parts.append(f"(?s:.){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}")
    return restricted(parts[0], [(part, False) for part in parts[1:]]) if len(parts) > 1 else parts[0]


def _asked(names: Any) -> set[str]:
    """Return the keywords with an effect on names."""
    if not isinstance(names, dict):
        return set()
    return {key for key in names if key != "type" and getattr(KEYWORDS.get(key), "status", "annotation") == "enforced"}


def _only_matching(body: str, required: list[str], keywords: dict[str, Any]) -> None:
    """Restrict names to those that an expression matches. Raises AutomatonError."""
    patterns, rest = keywords.get("patternProperties", {}), keywords.get("additionalProperties", True)
    properties = keywords.get("properties", {})
    bodies = {pattern: pattern.removeprefix("^").removesuffix("$") for pattern in patterns}
    names = dict.fromkeys((*properties, *required))
    if names:
        allowed, readers = Expression(body), {one: Expression(other) for one, other in bodies.items()}
        given = {}
        for name in names:
            values = [patterns[one] for one, reader in readers.items() if reader.matches(name)]
            values = [properties[name], *values] if name in properties else values or [rest]
            given[name] = allowed.matches(name) and (values[0] if len(values) == 1 else {"allOf": values})
        keywords["properties"] = given
    taken = [(escape_text(name), True) for name in names]
    found: dict[str, Any] = {}
    for pattern, other in bodies.items():
        if (both := _both(other, [(body, False), *taken])) is not None:
            _add(found, f"^(?:{both})$", patterns[pattern])
    if rest is not False:
        conditions = [*((other, True) for other in bodies.values()), *taken]
        if (free := _both(body, conditions) if conditions else body) is not None:
            found[f"^(?:{free})$"] = rest
    keywords["patternProperties"] = found
    keywords["additionalProperties"] = False


def _only_names(listed: dict[str, None], schema: dict[str, Any], keywords: dict[str, Any], place: Place) -> None:
    properties, value = keywords.get("properties", {}), keywords.get("additionalProperties", True)
    is_given = not {"additionalProperties", "unevaluatedProperties"}.isdisjoint(schema)
    if place.is_alone and properties and not is_given:
        value = True  # the names are listed here, not in properties
    keywords["properties"] = {name: properties.get(name, value) for name in listed} | {
        name: False for name in properties if name not in listed
    }


def _counts(schema: dict[str, Any], keywords: dict[str, Any], required: list[str], place: Place) -> None:
    """Enforce ``minProperties`` and ``maxProperties`` unless a derived schema does; free names then differ."""
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    high = length(schema, "maxProperties", place.pointer) if "maxProperties" in schema else None
    properties = keywords.get("properties", {})
    is_free = not properties and not required
    is_closed = keywords.get("additionalProperties") is False and "patternProperties" not in keywords
    is_mixed = not is_closed and any(name not in required for name in properties)  # the library does not count these
    if is_closed and low == len(properties) > 0:
        required += [name for name in properties if name not in required]
    if low > len(required) and not counts_of_names(schema, low):
        if is_mixed or (low > 1 and not is_free):
            keywords[CHECKED] = place.at("minProperties")
        else:
            keywords["minProperties"] = low
    if high is not None and not (is_closed and high >= len(properties)):
        is_explicit = schema.get("additionalProperties") is False and "patternProperties" not in schema
        is_derived = is_explicit and bool(absent_names(schema, high))
        if is_mixed or (is_closed and high > 1 and not is_derived):
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
