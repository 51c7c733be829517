"""Splits text into sentences by heuristics; a wrong boundary only makes a part longer or shorter.

Line ends also end sentences, so that list items and table rows are separate parts. Text that must not be split (JSON, a
quotation) is kept together. Runs in linear time for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["Part", "split_sentences"]

Part = tuple[int, int]
"""Start and end, in characters."""

# Marks that end a sentence, with closing quotes and brackets; in Chinese and Japanese no space follows.
_END = re.compile(
    "(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019\u00bb)\\]]*+(?=\\s)"
    '|[\u3002\uff01\uff1f]++["\u201d\u2019\u300d\u300f\uff09]*+'
)
_MARKS = ".!?\u2026\u3002\uff01\uff1f"
_SHORT = "Dr Mr Mrs Ms Prof St No Nr vs etc e.g i.e cf approx Fig Eq Inc Ltd Jr Sr z.B bzw ca"
_ABBREVIATION = re.compile(
    "(?:^|[\\s(\\[\"'\u201c\u2018])(?:[A-Z]|" + "|".join(map(re.escape, _SHORT.split())) + ")\\.$"
)
_MAX_ABBREVIATION_CHARS = 12
_OPENING = {"{": "}", "[": "]"}
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "\u201e": "\u201c"}
_QUOTE = re.compile('["\u201c\u201d\u201e\u00ab\u00bb]')
_MAX_CHARS = 2000  # per part; longer ones are not sentences


def split_sentences(text: str, start: int = 0, end: int | None = None) -> list[Part]:
    """Return the sentences of ``text[start:end]`` in order, without the white space between them."""
    end = len(text) if end is None else end
    parts: list[Part] = []
    for line_start, line_end in _lines(text, start, end):
        parts += _sentences_of_line(text, line_start, line_end)
    return parts


def _lines(text: str, start: int, end: int) -> Iterator[Part]:
    """Yield non-blank lines; lines within brackets that span several are kept together."""
    begin: int | None = None
    depth = 0
    line_start = start
    for line in text[start:end].splitlines(keepends=True):
        line_end = line_start + len(line)
        if begin is not None or line.strip():
            begin = line_start if begin is None else begin
            if depth or line.lstrip()[:1] in _OPENING:
                depth = max(0, depth + sum(map(line.count, "{[")) - sum(map(line.count, "}]")))
            if depth == 0 or line_end - begin > _MAX_CHARS:
                yield begin, line_end
                begin, depth = None, 0
        line_start = line_end
    if begin is not None:
        yield begin, end


def _sentences_of_line(text: str, start: int, end: int) -> Iterator[Part]:
    """Yield the sentences between ``start`` and ``end``, trimmed."""
    line = text[start:end]
    if line.lstrip()[:1] in _OPENING and len(line) <= _MAX_CHARS:
        yield from _trimmed(text, start, end)
        return
    begin = scanned = start
    closing: str | None = None  # closing mark of the open quotation
    for match in _END.finditer(line):
        boundary = start + match.end()
        closing = _behind(text[scanned:boundary], closing)
        scanned = boundary
        if closing is not None and boundary - begin < _MAX_CHARS:
            continue
        if match.group()[-1] not in _MARKS and text[boundary : boundary + 2].strip()[:1].islower():
            continue  # "Wait." he said.
        if _ABBREVIATION.search(text[max(begin, boundary - _MAX_ABBREVIATION_CHARS) : boundary]):
            continue
        yield from _trimmed(text, begin, boundary)
        begin, closing = boundary, None
    yield from _trimmed(text, begin, end)


def _behind(piece: str, closing: str | None) -> str | None:
    """Return the closing mark of the quotation still open after a piece of text, or None."""
    for match in _QUOTE.finditer(piece):
        if closing is None:
            closing = _QUOTES.get(match.group())
        elif match.group() == closing:
            closing = None
    return closing


def _trimmed(text: str, start: int, end: int) -> Iterator[Part]:
    """Yield the part without surrounding white space; nothing if it is blank."""
    piece = text[start:end]
    begin = end - len(piece.lstrip())
    if begin < end:
        yield begin, begin + len(piece.strip())
