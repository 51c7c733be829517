"""Splits text into units: sentences, and what is only understood as a whole.

A numbered list is one unit, with the line that introduces it: a step that is missing makes the others wrong. So is a
quotation of several sentences or lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from enginehouse_compress.sentences import Part, split_sentences

__all__ = ["split_units"]

# "1. ", "(2) ", "a) ", "iv. ", "1\u3001", "\u2460", "Step 3: ", "\u7b2c\u4e00\u6b65"
_ITEM = re.compile(
    r"[ \t]*(?:[(\uff08]?(?P<number>\d{1,3})(?:[.)\uff09](?=[ \t])|[\u3001\uff0e\uff09])"
    r"|[(]?(?:[a-z]|[ivx]{1,5})[.)][ \t]"
    r"|(?P<sign>[\u2460-\u2473])"
    r"|\w{2,10}[ \t](?P<step>\d{1,3})[:.)][ \t]"
    r"|\u7b2c[\u4e00-\u5341\d]{1,3}[\u6b65\u9879\u6761])"
)
_CITED = re.compile(r"[ \t]*>")
_OPENING = {"\u201c": "\u201d", "\u201e": "\u201c", "\u00ab": "\u00bb", "\u300c": "\u300d", "\u300e": "\u300f"}
_MAX_QUOTATION_CHARS = 2000  # an opening mark without its closing one does not hold everything


def split_units(text: str, start: int = 0, end: int | None = None) -> list[Part]:
    """Return the units of ``text[start:end]`` in order, without the white space between them."""
    parts = split_sentences(text, start, end)
    units: list[Part] = []
    index = 0
    while index < len(parts):
        size = _list_size(text, parts, index) or _cited_size(text, parts, index) or _quotation_size(text, parts, index)
        units.append((parts[index][0], parts[index + size - 1][1]))
        index += size
    return units


def _list_size(text: str, parts: Sequence[Part], index: int) -> int:
    """Return the number of sentences of the numbered list that begins here, or with the next sentence; 0 if none."""
    first = index
    if text[parts[index][1] - 1] in ":\uff1a" and index + 1 < len(parts):
        first = index + 1
    if not _is_item(text, parts[first], None):
        return 0
    size, number, num_items = first - index, None, 0
    for part in map(parts.__getitem__, range(first, len(parts))):
        if _begins_line(text, part[0]):
            item = _is_item(text, part, number)
            if item is None and not _is_indented(text, part[0]):
                break
            if item is not None:
                number, num_items = item, num_items + 1
        size += 1
    return size if num_items > 1 else 0


def _is_item(text: str, part: Part, before: int | None) -> int | None:
    """Return the number of a list item; None if the part is none, or begins another list. -1: it has no digits."""
    if not _begins_line(text, part[0]):
        return None
    match = _ITEM.match(text, part[0], part[1])
    if match is None:
        return None
    said = match["number"] or match["step"]
    number = int(said) if said else -1 if match["sign"] is None else ord(match["sign"]) - 0x245F
    return None if before is not None and 0 <= number <= before else number


def _cited_size(text: str, parts: Sequence[Part], index: int) -> int:
    """Return the number of sentences in consecutive lines that begin with ``>``; 0 if there is none."""
    size = 0
    for part in map(parts.__getitem__, range(index, len(parts))):
        if _begins_line(text, part[0]) and not _CITED.match(text, part[0]):
            break
        size += 1
        if size == 1 and not _CITED.match(text, part[0]):
            return 0
    return size


def _quotation_size(text: str, parts: Sequence[Part], index: int) -> int:
    """Return the number of sentences of the quotation that begins here, at least 1."""
    closing = _open_mark(text, *parts[index])
    if closing is not None:
        for other in range(index + 1, len(parts)):
            start, end = parts[other]
            if end - parts[index][0] > _MAX_QUOTATION_CHARS:
                break
            if closing in text[start:end]:
                return other - index + 1
    return 1


def _open_mark(text: str, start: int, end: int) -> str | None:
    """Return the closing mark of the quotation that is open at ``end``."""
    closing: str | None = None
    for mark in text[start:end]:
        if closing is None:
            closing = _OPENING.get(mark)
        elif mark == closing:
            closing = None
    return closing


def _begins_line(text: str, start: int) -> bool:
    """True if only white space is before ``start`` in its line."""
    before = text[max(0, start - 80) : start].rpartition("\n")[2]
    return not before.strip()


def _is_indented(text: str, start: int) -> bool:
    return start > 0 and text[start - 1] in " \t"
