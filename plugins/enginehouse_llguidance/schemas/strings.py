"""String keywords, rewritten as regular expressions of the library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from enginehouse_llguidance.formats import STRING_FORMATS
from enginehouse_llguidance.patterns import (
    AutomatonError,
    NothingMatches,
    Pattern,
    PatternError,
    restricted,
    translate_pattern,
)
from enginehouse_llguidance.schemas.markers import ESCAPED, MATCHED
from enginehouse_llguidance.schemas.numbers import is_finite, is_number
from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer

__all__ = ["MAX_PATTERNS", "has_control_characters", "is_text", "length", "read_pattern", "string_keywords"]

_CONTROLS = re.compile(
    r"\\(?:c|x[017]|u00[017]|0|v|p\{C)|[\x00-\x1f\x7f]"
)  # an expression may need a control character
_ESCAPED = frozenset("\b\t\n\f\r")
_MAX_COUNT = 2**31 - 1  # nothing that is written is as long
MAX_PATTERNS = 5
"""Maximum number of expressions for one string: the library intersects their automata. 10 take 0.2 s, 12 take 3 s."""


def string_keywords(schema: Mapping[str, Any], pointer: str, *, is_loose: bool = False) -> dict[str, Any]:
    """Return the keywords that enforce the string keywords of ``schema``.

    Args:
        is_loose: only one expression is used, and lengths are left to the check of complete values.
    """
    keywords: dict[str, Any] = {}
    for key in ("minLength", "maxLength"):
        if key in schema:
            keywords[key] = length(schema, key, pointer)
    patterns, is_exact = [], True
    if "pattern" in schema:
        found = read_pattern(schema["pattern"], join_pointer(pointer, ["pattern"]))
        patterns += [found.regex, *found.conditions]
        is_exact = found.is_exact
        if _CONTROLS.search(schema["pattern"]) and _needs_controls(found.regex):
            keywords[ESCAPED] = join_pointer(pointer, ["pattern"])
    if "format" in schema and (regex := _format(schema["format"], join_pointer(pointer, ["format"]))):
        patterns.insert(1, regex)
    if patterns and is_loose:
        is_exact = is_exact and len(patterns) == 1 and keywords.keys() <= {ESCAPED}
        patterns, keywords = patterns[:1], {key: value for key, value in keywords.items() if key == ESCAPED}
    if patterns:
        keywords["pattern"] = f"^(?:{patterns[0]})$"
    if len(patterns) > 1:
        keywords["allOf"] = [{"pattern": f"^(?:{regex})$"} for regex in patterns[1:MAX_PATTERNS]]
    if not is_exact or len(patterns) > MAX_PATTERNS:
        keywords[MATCHED] = join_pointer(pointer, ["pattern" if "pattern" in schema else "format"])
    return keywords


def read_pattern(value: Any, pointer: str) -> Pattern:
    """Translate a ``pattern``."""
    if not isinstance(value, str):
        raise SchemaProblem(pointer, "must be a string")
    try:
        return translate_pattern(value, search=True)
    except PatternError as error:
        raise SchemaProblem(pointer, str(error)) from error


def _needs_controls(regex: str) -> bool:
    """Return True if all texts that match an expression contain characters that are only written with escapes."""
    try:
        restricted(regex, [("[\\x{8}-\\x{a}\\x{c}-\\x{d}\\x{20}-\\x{7e}\\x{80}-\\x{10ffff}]*", False)])
    except NothingMatches:
        return True
    except AutomatonError:
        pass
    return False


def length(schema: Mapping[str, Any], key: str, pointer: str) -> int:
    """Return the value of a keyword that is a count."""
    value = schema[key]
    if not is_number(value) or not is_finite(value) or value != int(value) or value < 0:
        raise SchemaProblem(join_pointer(pointer, [key]), "must be a whole number of at least 0")
    return min(int(value), _MAX_COUNT)


def is_text(value: str) -> bool:
    """Return False for a string with a lone surrogate, which is not a character."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def has_control_characters(text: str) -> bool:
    """Return True if a string is only written with escapes such as ``\\u0000``, besides those of one letter."""
    return any((char < " " and char not in _ESCAPED) or char == "\x7f" for char in text)


def _format(name: Any, pointer: str) -> str | None:
    if not isinstance(name, str):
        raise SchemaProblem(pointer, "must be a string")
    return STRING_FORMATS.get(name)  # an unknown one is an annotation
