"""Object keywords. Objects whose schema is not combined are closed; free names may repeat, so they are not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.problems import SchemaProblem
from enginehouse_llguidance.schemas.strings import length, read_pattern, string_keywords

__all__ = ["Prepare", "object_keywords"]

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
    elif _unevaluated_is_closed(schema, place) or _suffices(schema, properties, patterns, required, place):
        keywords["additionalProperties"] = False
    if patterns:
        keywords["patternProperties"] = _pattern_properties(patterns, required, keywords, place, prepare)
    if schema.get("propertyNames", True) not in (True, {}):
        _restrict_names(schema, required, keywords, place)
    _counts(schema, keywords, required, place)
    if required:
        keywords["required"] = required
    return keywords


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


def _unevaluated_is_closed(schema: dict[str, Any], place: Place) -> bool:
    value = schema.get("unevaluatedProperties", True)
    if value in (True, {}):
        return False
    if value is not False or not place.is_alone:
        message = "is only supported as false, without other schemas around"
        raise SchemaProblem(place.at("unevaluatedProperties"), message)
    return True


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
    is_simple = len(patterns) == 1 and all(name.isascii() and name.isprintable() for name in properties)
    if depends and not (is_simple and keywords.get("additionalProperties") is False):
        message = (
            "what classes, '.' and '$' match depends on the dialect, so that a name may match twice; "
            "use sets such as [0-9], or a single pattern with additionalProperties false"
        )
        raise SchemaProblem(depends, message)
    return prepared


def _restrict_names(schema: dict[str, Any], required: list[str], keywords: dict[str, Any], place: Place) -> None:
    """Rewrite ``propertyNames`` as the only pattern that names may match."""
    pointer, names = place.at("propertyNames"), schema["propertyNames"]
    if "properties" in keywords or "patternProperties" in keywords:
        raise SchemaProblem(pointer, "is not supported together with properties and patternProperties")
    if not isinstance(names, dict):
        raise SchemaProblem(pointer, "is only supported as an object")
    asked = {key: value for key, value in names.items() if key not in ("type", "title", "description", "$comment")}
    if names.get("type", "string") != "string" or len({"length" if "Length" in key else key for key in asked}) != 1:
        raise SchemaProblem(pointer, "is only supported with one of pattern, format, enum, const and lengths")
    value = keywords.get("additionalProperties", True)
    if "enum" in asked or "const" in asked:
        allowed = asked["enum"] if "enum" in asked else [asked["const"]]
        if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
            raise SchemaProblem(pointer, "names must be strings")
        keywords["properties"] = dict.fromkeys(allowed, value)
    elif asked.keys() <= {"pattern", "format", "minLength", "maxLength"} and not required:
        found = string_keywords(asked, pointer)
        lengths = f"^(?s:.){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}$"
        keywords["patternProperties"] = {found.get("pattern", lengths): value}
    else:
        message = "is only supported as enum, const, or without required as one of pattern, format and lengths"
        raise SchemaProblem(pointer, message)
    keywords["additionalProperties"] = False


def _counts(schema: dict[str, Any], keywords: dict[str, Any], required: list[str], place: Place) -> None:
    """Enforce ``minProperties`` and ``maxProperties`` where names cannot repeat."""
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    high = length(schema, "maxProperties", place.pointer) if "maxProperties" in schema else None
    properties = keywords.get("properties", {})
    is_closed = keywords.get("additionalProperties") is False and "patternProperties" not in keywords
    if is_closed and low == len(properties) > 0:
        required += [name for name in properties if name not in required]
    if low > len(required):
        if low > 1:
            message = "more than 1 is only supported where required settles it: names that are free may repeat"
            raise SchemaProblem(place.at("minProperties"), message)
        keywords["minProperties"] = low
    if high is not None and not (is_closed and high >= len(properties)):
        keywords["maxProperties"] = high
