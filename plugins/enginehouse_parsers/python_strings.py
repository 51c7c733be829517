"""Escape sequences of texts in Python and JSON, read one at a time from text that arrives in pieces."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["read_escape"]

_SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*+")
_OCTAL = re.compile(r"[0-7]*+")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_LOW_BEGINNING = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_LONGEST_NAME = 100
_REPLACEMENT = "?"  # for half of a surrogate pair, which cannot be sent


def read_escape(text: str, quote: str) -> tuple[str, int] | None:
    """Read the escape sequence at the beginning of a text.

    A sequence that Python does not know stays as it is; a pair of surrogates is one character, as in JSON.

    Args:
        text: begins with a backslash.
        quote: that of the string; JSON's ``\\/`` is known in double quotes only.

    Returns:
        Its text, and its length; None if more text is needed.
    """
    kind = text[1:2]
    if not kind:
        return None
    if kind in _NUM_DIGITS:
        return _read_hex(text, kind)
    if kind in "01234567":
        digits = _OCTAL.match(text, 1, 4)
        assert digits is not None
        return None if digits.end() == len(text) < 4 else (chr(int(digits[0], 8)), digits.end())
    if kind == "N":
        return _read_name(text)
    if kind == "/" and quote == '"':
        return "/", 2
    return _SIMPLE.get(kind, text[:2]), 2


def _read_hex(text: str, kind: str) -> tuple[str, int] | None:
    end = 2 + _NUM_DIGITS[kind]
    digits = _HEX.match(text, 2, end)
    assert digits is not None
    if digits.end() < end:
        return None if digits.end() == len(text) else (text[:2], 2)
    code = int(digits[0], 16)
    if 0xD800 <= code < 0xDC00:
        following = text[end : end + 6]
        if low := _LOW.fullmatch(following):
            return chr(0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00), end + 6
        return None if len(following) < 6 and _LOW_BEGINNING.fullmatch(following) else (_REPLACEMENT, end)
    if 0xDC00 <= code < 0xE000:
        return _REPLACEMENT, end
    return (chr(code), end) if code <= 0x10FFFF else (text[:2], 2)


def _read_name(text: str) -> tuple[str, int] | None:
    """Read a character given by its name, as in ``\\N{BULLET}``."""
    end = text.find("}")
    if text[2:3] in ("", "{") and end < 0 and len(text) < _LONGEST_NAME:
        return None
    try:
        return unicodedata.lookup(text[3:end] if text[2:3] == "{" else ""), end + 1
    except KeyError:
        return text[:2], 2
