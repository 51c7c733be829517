r"""Classes of characters in regular expressions: ``\d``, ``\p{Lu}`` and the like.

ECMAScript and Python disagree on the members of ``\d``, ``\w`` and ``\s``. Each has a narrow form, which both match,
and a wide one, which either may match.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable

__all__ = [
    "DOT",
    "EVERY",
    "LAST",
    "NOT_ASCII",
    "SURROGATES",
    "Ranges",
    "category_ranges",
    "complement",
    "escape",
    "has_char",
    "joined",
    "named_class",
    "other_case",
    "property_of",
]

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends inclusive."""

LAST = 0x10FFFF
SURROGATES: Ranges = ((0xD800, 0xDFFF),)

EVERY = "(?s:.)"
DOT = "[^\\n\\r\\x{2028}\\x{2029}]"

_DIGITS, _WORD, _SPACES = "0-9", "0-9A-Za-z_", "\\t\\n\\x{b}\\x{c}\\r\\x{20}"
_WIDE_WORD = "\\p{L}\\p{M}\\p{N}\\p{Pc}"
_WIDE_SPACES = (
    "\\t-\\r\\x{1c}-\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{180e}\\x{2000}-\\x{200b}\\x{2028}\\x{2029}"
    "\\x{202f}\\x{205f}\\x{3000}\\x{feff}"
)
NOT_ASCII = "\\x{80}-\\x{10ffff}"
# Characters that both dialects match, and those that either matches.
_NARROW = {"d": _DIGITS, "w": _WORD, "s": _SPACES, "D": "[^\\p{N}]", "W": f"[^{_WIDE_WORD}]", "S": f"[^{_WIDE_SPACES}]"}
_WIDE = {
    "d": "\\p{N}",
    "w": _WIDE_WORD,
    "s": _WIDE_SPACES,
    "D": f"[^{_DIGITS}]",
    "W": f"[^{_WORD}]",
    "S": f"[^{_SPACES}]",
}
# Characters that either dialect may match, used in negations: everything beyond ASCII counts as matching.
_WIDEST = {
    "d": f"{_DIGITS}{NOT_ASCII}",
    "w": f"{_WORD}{NOT_ASCII}",
    "s": f"\\t-\\r\\x{{1c}}-\\x{{20}}{NOT_ASCII}",
    "D": f"\\x{{0}}-\\x{{2f}}\\x{{3a}}-\\x{{7f}}{NOT_ASCII}",
    "W": f"\\x{{0}}-\\x{{2f}}\\x{{3a}}-\\x{{40}}\\x{{5b}}-\\x{{5e}}\\x{{60}}\\x{{7b}}-\\x{{7f}}{NOT_ASCII}",
    "S": f"\\x{{0}}-\\x{{8}}\\x{{e}}-\\x{{1b}}\\x{{21}}-\\x{{7f}}{NOT_ASCII}",
}

_CATEGORIES = {
    **{"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt"},
    **{"Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc"},
    **{"Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl"},
    **{"Other_Number": "No", "Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd"},
    **{"Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf"},
    **{"Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk"},
    **{"Other_Symbol": "So", "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl"},
    **{"Paragraph_Separator": "Zp", "Other": "C", "Control": "Cc", "Format": "Cf", "Private_Use": "Co"},
    "Unassigned": "Cn",
}
"""Long names of the general categories, in ECMAScript, and their short ones."""

_ASCII_CLASSES = {
    **{
        "ASCII": "\\x{0}-\\x{7f}",
        "Alnum": "0-9A-Za-z",
        "Alpha": "A-Za-z",
        "Digit": "0-9",
        "Lower": "a-z",
        "Upper": "A-Z",
    },
    **{"XDigit": "0-9A-Fa-f", "Blank": "\\t\\x{20}", "Space": _SPACES, "Graph": "\\x{21}-\\x{7e}"},
    **{"Print": "\\x{20}-\\x{7e}", "Punct": "\\x{21}-\\x{2f}\\x{3a}-\\x{40}\\x{5b}-\\x{60}\\x{7b}-\\x{7e}"},
    "Cntrl": "\\x{0}-\\x{1f}\\x{7f}",
}
"""Properties with members in ASCII only: of ECMAScript, and the POSIX classes of Java."""

_PROPERTY = re.compile(
    r"Alphabetic|Lowercase|Uppercase|White_Space|Emoji|Ideographic|X?ID_Start|X?ID_Continue"
    r"|(?:Script|sc|Script_Extensions|scx)=[A-Za-z_]{1,40}"
)
"""Others that the library knows."""


def named_class(name: str, *, is_negated: bool, is_widened: bool) -> str:
    r"""Return the contents of the brackets for ``d``, ``D``, ``w``, ``W``, ``s`` or ``S``.

    Args:
        is_negated: the brackets exclude their contents.
        is_widened: what either dialect may match is asked for, not what both match.
    """
    if is_widened:
        return (_NARROW if is_negated else _WIDEST)[name]
    return (_WIDE if is_negated else _NARROW)[name]


def property_of(name: str, *, is_inside: bool) -> str | None:
    """Return the contents of the brackets for a property of characters, or for its complement; None if unknown."""
    if name in _ASCII_CLASSES:
        return _ASCII_CLASSES[name] if is_inside else f"[^{_ASCII_CLASSES[name]}]"
    category = _CATEGORIES.get(name, name)
    if category not in _CATEGORIES.values() and not _PROPERTY.fullmatch(name):
        return None
    return f"\\{'p' if is_inside else 'P'}{{{category}}}"


def escape(char: str) -> str:
    """Return an expression that matches exactly this character."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


@functools.cache
def category_ranges(name: str) -> Ranges:
    """Return the characters of a general category, without surrogates. A tenth of a second for the first one."""
    return joined(one for category, ranges in _all_categories().items() if category.startswith(name) for one in ranges)


@functools.cache
def _all_categories() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    begin, current = 0, unicodedata.category("\0")
    for code in range(1, LAST + 2):
        category = unicodedata.category(chr(code)) if code <= LAST else ""
        if category != current:
            found.setdefault(current, []).append((begin, code - 1))
            begin, current = code, category
    del found["Cs"]
    return found


def complement(ranges: Ranges) -> Ranges:
    """Return the characters outside of ranges."""
    left, start = [], 0
    for low, high in joined(ranges):
        if low > start:
            left.append((start, low - 1))
        start = high + 1
    return (*left, (start, LAST)) if start <= LAST else tuple(left)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and merge adjacent ones."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def other_case(low: int, high: int) -> list[tuple[int, int]]:
    """Return the characters of a range in the other case: those of ASCII, or of a single character."""
    if low == high:
        char = chr(low)
        return [(ord(one), ord(one)) for one in {char.lower(), char.upper()} if len(one) == 1]
    found = []
    for first, last, distance in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
        begin, end = max(low, first), min(high, last)
        found += [(begin + distance, end + distance)] if begin <= end else []
    return found


def has_char(ranges: Ranges, char: int) -> bool:
    """Return True if a code point is in ranges."""
    place = bisect_right(ranges, (char, LAST)) - 1
    return place >= 0 and ranges[place][1] >= char
