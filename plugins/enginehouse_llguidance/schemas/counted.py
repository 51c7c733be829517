"""Numbers of properties: ``minProperties`` and ``maxProperties``."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

from enginehouse_llguidance.schemas.markers import CHECKED, UNIQUE_NAMES
from enginehouse_llguidance.schemas.places import Place
from enginehouse_llguidance.schemas.strings import length

__all__ = ["absent_names", "count_names", "counts_of_names"]

_MAX_CHOICES = 64
_MAX_COUNTED = 32  # properties that may be absent: the library takes a space that grows with their square


def count_names(
    schema: dict[str, Any], keywords: dict[str, Any], required: list[str], place: Place, *, is_loose: bool
) -> None:
    """Enforce ``minProperties`` and ``maxProperties`` unless a derived schema does; free names then differ.

    Args:
        is_loose: they are checked if another schema restricts the same object.
    """
    low = length(schema, "minProperties", place.pointer) if "minProperties" in schema else 0
    high = length(schema, "maxProperties", place.pointer) if "maxProperties" in schema else None
    properties = keywords.get("properties", {})
    is_free = not properties and not required
    is_closed = keywords.get("additionalProperties") is False and "patternProperties" not in keywords
    num_optional = sum(name not in required for name in properties)
    is_mixed = not is_closed and num_optional > 0  # the library does not count these
    is_checked = is_mixed or num_optional > _MAX_COUNTED or (is_loose and not place.is_alone)
    if is_closed and low == len(properties) > 0:
        required += [name for name in properties if name not in required]
    if low > len(required) and not counts_of_names(schema, low):
        if is_checked or (low > 1 and not is_free):
            keywords[CHECKED] = place.at("minProperties")
        else:
            keywords["minProperties"] = low
    if high is not None and not (is_closed and high >= len(properties)):
        is_explicit = schema.get("additionalProperties") is False and "patternProperties" not in schema
        is_derived = is_explicit and bool(absent_names(schema, high))
        if (is_checked and not is_derived) or (is_closed and high > 1 and not is_derived):
            keywords[CHECKED] = place.at("maxProperties")
        elif not is_derived:
            keywords["maxProperties"] = high
    if keywords.get("minProperties", 0) > 1 or CHECKED in keywords:
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
