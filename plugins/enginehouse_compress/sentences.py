"""Splits text into sentences by heuristics; a wrong boundary only makes a part longer or shorter.

Line ends also end sentences, so that list items and table rows are separate parts. Text that must not be split (JSON, a
quotation) is kept together. Scripts without spaces between words need none after a sentence; Thai has no mark at its
end, so a space ends one that is long enough. Runs in linear time for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["Part", "split_sentences"]

Part = tuple[int, int]
"""Start and end, in characters."""

_THAI = "\u0e01-\u0e3a\u0e40-\u0e4e"  # letters and vowels, without digits and marks
# Marks that end a sentence, with closing quotes and brackets: before a space; in Chinese and Japanese, Hindi, Burmese,
# Khmer, Amharic, Arabic and Urdu anywhere; and a space between two Thai letters.
_END = re.compile(
    "(?<![.!?\u2026])[.!?\u2026]++[\"'\u201c\u201d\u2019\u00bb)\\]]*+(?=\\s)"
    '|[\u3002\uff01\uff1f\uff61\u0964\u0965\u104b\u17d4\u1362\u061f\u06d4]++["\u201d\u2019\u300d\u300f\u300b\uff09\u00bb)]*+'
    f"|(?<=[{_THAI}]) ++(?=[{_THAI}])"
)
_MARKS = ".!?\u2026\u3002\uff01\uff1f\uff61\u0964\u0965\u104b\u17d4\u1362\u061f\u06d4"
_MIN_THAI_CHARS = 30  # a space also separates clauses and the items of a list
_SHORT = "Dr Mr Mrs Ms Prof St No Nr vs etc e.g i.e cf approx Fig Eq Inc Ltd Jr Sr z.B bzw ca"
_ABBREVIATION = re.compile(
    "(?:^|[\\s(\\[\"'\u201c\u2018])(?:[A-Z]|" + "|".join(map(re.escape, _SHORT.split())) + ")\\.$"
)
_MAX_ABBREVIATION_CHARS = 12
# The number of a list item at the beginning of a line, and "2. Mai", "2. maj" in a sentence.
_ITEM_NUMBER = re.compile(r"\s*\(?(?:\d{1,3}|[A-Za-z]|[ivx]{1,5})\.$")
_ORDINAL = re.compile(r"(?<!\S)\d{1,2}\.$")
_AFTER_ORDINAL = re.compile(
    r"\s(?:[^\W\d_A-Z]|Jan(?:uar|\.)|Feb(?:ruar|\.)|M\u00e4rz|Apr(?:il|\.)|Mai|Jun[i.]|Jul[i.]|Aug(?:ust|\.)|Sep(?:tember|t?\.)"
    r"|Okt(?:ober|\.)|Nov(?:ember|\.)|Dez(?:ember|\.)|Jahrhundert)"
)
_OPENING = {"{": "}", "[": "]"}
_QUOTES = {
    '"': '"', "\u201c": "\u201d", "\u00ab": "\u00bb", "\u201e": "\u201c", "\u300c": "\u300d", "\u300e": "\u300f",
}  # fmt: skip
_QUOTE = re.compile('["\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d\u300e\u300f]')
_WIDE_CLOSING = "\u300d\u300f\u201d"  # after it no space follows in Chinese and Japanese
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
        if match.group().isspace():
            if boundary - begin < _MIN_THAI_CHARS:
                continue
        elif match.group()[-1] not in _MARKS and _goes_on(text, boundary, match.group()):
            continue  # "Wait." he said.
        last = text[max(begin, boundary - _MAX_ABBREVIATION_CHARS) : boundary]
        if _ABBREVIATION.search(last):
            continue
        if begin == start and boundary - begin <= _MAX_ABBREVIATION_CHARS and _ITEM_NUMBER.match(text[begin:boundary]):
            continue
        if _ORDINAL.search(last) and _AFTER_ORDINAL.match(text, boundary):
            continue
        yield from _trimmed(text, begin, boundary)
        begin, closing = boundary, None
    yield from _trimmed(text, begin, end)


def _goes_on(text: str, boundary: int, mark: str) -> bool:
    """True if the sentence seems to continue after the quotation that ends at ``boundary``."""
    if mark[0] in ".!?\u2026":
        return text[boundary : boundary + 2].strip()[:1].islower()
    return mark[-1] in _WIDE_CLOSING and text[boundary : boundary + 1].isalpha()


def _behind(piece: str, closing: str | None) -> str | None:
    """Return the closing mark of the quotation still open after a piece of text, or None."""
    for match in _QUOTE.finditer(piece):
        if closing is None:
            is_end = match.group() == "\u201c" and match.start() > 0 and piece[match.start() - 1] in ".!?,\u2026"
            closing = None if is_end else _QUOTES.get(match.group())  # the mark that ends a German quotation
        elif match.group() == closing:
            closing = None
    return closing


def _trimmed(text: str, start: int, end: int) -> Iterator[Part]:
    """Yield the part without surrounding white space; nothing if it is blank."""
    piece = text[start:end]
    begin = end - len(piece.lstrip())
    if begin < end:
        yield begin, begin + len(piece.strip())
