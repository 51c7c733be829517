"""Support status of every JSON Schema keyword. The table in docs/structured.md is generated from this module."""

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen

__all__ = ["KEYWORDS", "TYPES", "Keyword", "allows_nothing", "is_enforced"]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@frozen
class Keyword:
    """Support status of a keyword.

    Attributes:
        status: ``annotation``: no constraint, as defined by the standard.
        note: limits of the enforcement.
    """

    status: Literal["enforced", "annotation"]
    note: str = ""


def _annotations(*names: str) -> dict[str, Keyword]:
    return {name: Keyword("annotation") for name in names}


_BOUND = (
    "to 15 digits, for integers to what a float holds; more are tightened to that; what is beyond 9·10^18 is checked"
)

KEYWORDS: dict[str, Keyword] = {
    # Core
    "$ref": Keyword(
        "enforced",
        "into the schema itself, also by `$id` and `$anchor`; recursive ones beside other keywords are checked",
    ),
    "$defs": Keyword("annotation", "what is referred to is checked"),
    "definitions": Keyword("annotation", "what is referred to is checked"),
    "$anchor": Keyword("annotation", "a reference may name it"),
    "$dynamicAnchor": Keyword("annotation", "a reference may name it"),
    "$recursiveAnchor": Keyword("annotation", "as `$dynamicAnchor`"),
    "$id": Keyword("annotation", "the base of references below it"),
    "id": Keyword("annotation", "as `$id` in drafts 3 and 4"),
    "$schema": Keyword("annotation", "2020-12 is what is enforced, with the array forms of earlier drafts"),
    "$vocabulary": Keyword("annotation"),
    "$comment": Keyword("annotation"),
    "$dynamicRef": Keyword("enforced"),
    "$recursiveRef": Keyword("enforced"),
    # Any type
    "type": Keyword("enforced", "also `any` and schemas, as in draft 3"),
    "enum": Keyword(
        "enforced", "numbers of more than 15 digits are checked; what no text in UTF-8 has is left out if there is more"
    ),
    "const": Keyword("enforced", "as `enum`"),
    "allOf": Keyword("enforced"),
    "anyOf": Keyword("enforced"),
    "oneOf": Keyword("enforced", "checked where a value may match two of the schemas without a complement (see `not`)"),
    "not": Keyword(
        "enforced",
        "of types, constants, bounds, lengths, patterns, formats, `required`, properties, items, `contains` and what"
        " joins them; of others it is checked",
    ),
    "if": Keyword("enforced", "checked where it has no complement (see `not`)"),
    "then": Keyword("enforced", "has no effect without `if`"),
    "else": Keyword("enforced", "has no effect without `if`"),
    # Numbers
    "minimum": Keyword("enforced", _BOUND),
    "maximum": Keyword("enforced", _BOUND),
    "exclusiveMinimum": Keyword("enforced", f"{_BOUND}; also as a flag beside `minimum`, as in draft 4"),
    "exclusiveMaximum": Keyword("enforced", "as `exclusiveMinimum`"),
    "multipleOf": Keyword(
        "enforced",
        "decimals such as 0.01 and values above 10000 are checked, as several of one number with a product above"
        " 100000; where fewer than one number in 1000 is a multiple, only about 1000 are allowed, those next to zero or"
        " to the bounds",
    ),
    # Strings
    "minLength": Keyword("enforced"),
    "maxLength": Keyword("enforced"),
    "pattern": Keyword(
        "enforced",
        "assertions whose automaton is large, and one within another, are checked; at most 5 expressions for one"
        " string, others are checked, as are back-references, atomic groups and conditions",
    ),
    "format": Keyword("enforced", "see below; others have no effect"),
    "contentEncoding": Keyword("annotation"),
    "contentMediaType": Keyword("annotation"),
    "contentSchema": Keyword("annotation"),
    # Arrays
    "items": Keyword("enforced"),
    "prefixItems": Keyword("enforced"),
    "additionalItems": Keyword("enforced", "beside the array form of `items`"),
    "minItems": Keyword("enforced"),
    "maxItems": Keyword("enforced"),
    "uniqueItems": Keyword("enforced"),
    "contains": Keyword("enforced", "the items asked for are among the first 8, or all of the first ones"),
    "minContains": Keyword(
        "enforced", "above 8, with `maxContains` above 4, those items are the first; above 1000 it is checked"
    ),
    "maxContains": Keyword("enforced", "checked where `contains` has no complement (see `not`)"),
    "unevaluatedItems": Keyword("enforced", "what one combination of branches evaluates; checked if there are many"),
    # Objects
    "properties": Keyword(
        "enforced",
        "in the order of the schema; of more than about 1000 that may be absent, those after 500 are checked",
    ),
    "required": Keyword("enforced", "also as a flag of a property, as in draft 3"),
    "additionalProperties": Keyword(
        "enforced", "read as `false` if it is absent and no other schema applies to the object"
    ),
    "patternProperties": Keyword(
        "enforced",
        "checked where more than 4 overlap, or those of joined schemas; only ASCII names beside classes on which"
        " dialects differ",
    ),
    "propertyNames": Keyword(
        "enforced", "checked where others than patterns, formats, lengths, constants and `anyOf` restrict names"
    ),
    "minProperties": Keyword("enforced", "checked beside `properties` and free names"),
    "maxProperties": Keyword(
        "enforced", "checked beside `properties` and free names, and among more than 64 choices of `properties`"
    ),
    "dependentRequired": Keyword("enforced"),
    "dependentSchemas": Keyword("enforced"),
    "dependencies": Keyword("enforced"),
    "unevaluatedProperties": Keyword(
        "enforced", "what one combination of branches evaluates; checked if there are many"
    ),
    # Annotations
    **_annotations("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    **_annotations("discriminator", "example", "externalDocs", "nullable", "xml"),  # OpenAPI
    # Earlier drafts
    "divisibleBy": Keyword("enforced", "of draft 3, as `multipleOf`"),
    "extends": Keyword("enforced", "of draft 3, as `allOf`"),
    "disallow": Keyword("enforced", "of draft 3, as `not`"),
}
"""An unlisted keyword is an annotation, as in the standard; core lists it as ignored."""


def is_enforced(name: str) -> bool:
    """Return True for a keyword that is not an annotation."""
    return name in KEYWORDS and KEYWORDS[name].status == "enforced"


def allows_nothing(schema: Any) -> bool:
    """Return True for ``false``, and for ``{"not": {}}`` as generators write it."""
    if not isinstance(schema, dict) or "$ref" in schema:
        return schema is False
    excluded = schema.get("not")
    return excluded is True or (isinstance(excluded, dict) and not any(map(is_enforced, excluded)))
