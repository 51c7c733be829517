"""Object keywords. Objects whose schema is not combined are closed; free names may repeat, so they are not counted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from enginehouse_llguidance.patterns import escape_text
from enginehouse_llguidance.schemas.counted import count_names
from enginehouse_llguidance.schemas.document import REFERENCES, Document, Pointer
from enginehouse_llguidance.schemas.evaluated import BRANCHING
from enginehouse_llguidance.schemas.markers import MATCHED, UNIQUE_NAMES
from enginehouse_llguidance.schemas.named import add_pattern_properties, restrict_names
from enginehouse_llguidance.schemas.places import Loosening, Place, Prepare
from enginehouse_llguidance.schemas.problems import SchemaProblem
from enginehouse_llguidance.schemas.strings import is_text, length

__all__ = ["is_closed_beside", "object_keywords"]

_MAX_OPTIONAL = 500  # properties that may be absent; 1000 exceed what the decoder allows after one token
_MAX_VALUES = 50
_FURTHER = frozenset({*REFERENCES, "dependencies", "dependentRequired", "dependentSchemas", "minProperties"}) - {"$ref"}


def object_keywords(
    schema: dict[str, Any], place: Place, prepare: Prepare, loosened: frozenset[Loosening] = frozenset()
) -> dict[str, Any]:
    """Return the keywords that enforce the object keywords of ``schema``.

    Args:
        place: ``is_alone`` only if nothing besides these keywords restricts the properties.
        prepare: prepares subschemas.
    """
    has_loose_names = "names" in loosened
    keywords: dict[str, Any] = {}
    properties = _mapping(schema, "properties", place)
    if properties:
        prepared = {name: prepare(value, "properties", name) for name, value in properties.items()}
        keywords["properties"] = {name: value for name, value in prepared.items() if is_text(name)}
    patterns = _mapping(schema, "patternProperties", place)
    required = _required(schema, place)
    if "additionalProperties" in schema:
        keywords["additionalProperties"] = prepare(schema["additionalProperties"], "additionalProperties")
    elif "unevaluatedProperties" in schema and BRANCHING.isdisjoint(schema):  # otherwise a derived schema closes it
        keywords["additionalProperties"] = prepare(schema["unevaluatedProperties"], "unevaluatedProperties")
    elif _suffices(schema, properties, patterns, required, place):
        keywords["additionalProperties"] = False
    if patterns:
        add_pattern_properties(schema, required, keywords, place, prepare, is_loose=has_loose_names)
    if schema.get("propertyNames", True) not in (True, {}):
        restrict_names(schema, required, keywords, place, prepare, is_loose=has_loose_names)
    count_names(schema, keywords, required, place, is_loose="counts" in loosened)
    if required:
        keywords["required"] = required
    if "properties" in loosened:
        _shorten(keywords, required, place)
    return keywords


def _shorten(keywords: dict[str, Any], required: list[str], place: Place) -> None:
    """Leave the last of many properties to one pattern with the values of all of them."""
    properties = keywords.get("properties", {})
    optional = [name for name, value in properties.items() if name not in required and value is not False]
    if len(optional) <= _MAX_OPTIONAL or "patternProperties" in keywords:
        return
    last = dict.fromkeys(optional[_MAX_OPTIONAL:])
    values = {json.dumps(properties[name]): properties[name] for name in last}
    value = {"anyOf": list(values.values())} if len(values) <= _MAX_VALUES else True
    keywords["patternProperties"] = {f"^(?:{'|'.join(map(escape_text, last))})$": value}
    keywords["properties"] = {name: one for name, one in properties.items() if name not in last}
    keywords |= {MATCHED: place.at("properties"), UNIQUE_NAMES: True}


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
    if not all(map(is_text, names)):
        raise SchemaProblem(place.at("required"), "a lone surrogate is not a character")
    return list(dict.fromkeys(names))


def _suffices(
    schema: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any], required: list[str], place: Place
) -> bool:
    """True if an object's schema is not combined and needs no further names; then none are allowed."""
    if not place.is_alone or not (properties or patterns) or any(name not in properties for name in required):
        return False
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    return bool(patterns) or low <= len(properties)
