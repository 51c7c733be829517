"""Keywords of prepared schemas for what the library does not enforce."""

from __future__ import annotations

__all__ = ["CHECKED", "ESCAPED", "FAR", "LISTED", "MATCHED", "UNIQUE", "UNIQUE_NAMES"]

UNIQUE = "x-unique"
"""The items of the array differ."""

UNIQUE_NAMES = "x-unique-names"
"""The names of the object differ: they are counted."""

CHECKED = "x-checked"
"""Complete values are evaluated with the request's own schema, because of the keyword at this pointer."""

LISTED = "x-listed"
"""The only numbers that are allowed."""

MATCHED = "x-matched"
"""Complete strings are matched against the request's own pattern, at this pointer."""

ESCAPED = "x-escaped"
"""The string has control characters, because of the pattern at this pointer."""

FAR = "x-far"
"""Bounds of numbers beyond those of the library."""
