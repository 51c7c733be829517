"""Array keywords, in the form of draft 2020-12."""

from __future__ import annotations

from typing import Any

from enginehouse_llguidance.schemas.evaluated import BRANCHING
from enginehouse_llguidance.schemas.markers import UNIQUE
from enginehouse_llguidance.schemas.places import Place, Prepare
from enginehouse_llguidance.schemas.problems import SchemaProblem
from enginehouse_llguidance.schemas.strings import length

__all__ = ["array_keywords"]


def array_keywords(schema: dict[str, Any], place: Place, prepare: Prepare) -> dict[str, Any]:
    """Return the keywords that enforce the array keywords of ``schema``.

    Args:
        place: ``is_alone`` only if nothing besides these keywords restricts the items.
        prepare: prepares subschemas.
    """
    keywords: dict[str, Any] = {}
    for key in ("minItems", "maxItems"):
        if key in schema:
            keywords[key] = length(schema, key, place.pointer)
    prefix_key = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    rest_key = "additionalItems" if prefix_key == "items" else "items"
    if prefix_key == "items" and "prefixItems" in schema:
        raise SchemaProblem(place.at("items"), "must be one schema beside prefixItems")
    if prefix_key in schema:
        if not isinstance(schema[prefix_key], list):
            raise SchemaProblem(place.at(prefix_key), "must be a list")
        keywords["prefixItems"] = [prepare(value, prefix_key, index) for index, value in enumerate(schema[prefix_key])]
    if rest_key in schema:
        keywords["items"] = prepare(schema[rest_key], rest_key)
    elif "unevaluatedItems" in schema and BRANCHING.isdisjoint(schema):  # otherwise a derived schema closes it
        keywords["items"] = prepare(schema["unevaluatedItems"], "unevaluatedItems")
    unique = schema.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise SchemaProblem(place.at("uniqueItems"), "must be true or false")
    if unique and keywords.get("maxItems", 2) > 1:
        keywords[UNIQUE] = True
    return keywords
