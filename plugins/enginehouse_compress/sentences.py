"""Where a text's sentences begin and end. A rule of thumb on purpose: a wrong border only makes a part longer or shorter.

Lines end sentences, too, so that items of lists and rows of tables are parts of their own. What must not be torn apart
(JSON, a quotation) is kept together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["Part", "split_sentences"]

Part = tuple[int, int]
"""Begin and end, in characters."""

_END = re.compile(r"""[.!?…]+["'”’»)\]]*(?=\s)|[。！？]+["”’」』）]*""")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[A-Z]|Dr|Mr|Mrs|Ms|Prof|St|No|Nr|vs|etc|e\.g|i\.e|cf|approx|Fig|Eq|Inc|Ltd|Jr|Sr|z\.B|bzw|ca)\.$"
)
_OPENING = {"{": "}", "[": "]"}
_QUOTES = {'"': '"', "“": "”", "«": "»", "„": "“"}
_MAX_CHARS = 2000  # of one part; a longer one is no sentence


def split_sentences(text: str, start: int = 0, end: int | None = None) -> list[Part]:
    """The sentences of ``text[start:end]`` in order, without the white space between them."""
    end = len(text) if end is None else end
    parts: list[Part] = []
    for line_start, line_end in _lines(text, start, end):
        parts += _sentences_of_line(text, line_start, line_end)
    return parts


def _lines(text: str, start: int, end: int) -> Iterator[Part]:
    """Lines that say something; lines inside of brackets that span several belong together."""
    begun: int | None = None
    depth = 0
    for match in re.finditer(r"[^\n]*(?:\n|$)", text[start:end]):
        line_start, line = start + match.start(), match.group()
        if not line.strip() and depth == 0:
            continue
        if begun is None:
            begun = line_start
        if depth or line.lstrip()[:1] in _OPENING:
            depth = max(0, depth + sum(line.count(char) for char in "{[") - sum(line.count(char) for char in "}]"))
        line_end = line_start + len(line)
        if depth == 0 or line_end - begun > _MAX_CHARS:
            yield begun, line_end
            begun, depth = None, 0
    if begun is not None and text[begun:end].strip():
        yield begun, end


def _sentences_of_line(text: str, start: int, end: int) -> Iterator[Part]:
    """Sentences between ``start`` and ``end``, trimmed."""
    line = text[start:end]
    if line.lstrip()[:1] in _OPENING and len(line) <= _MAX_CHARS:
        yield from _trimmed(text, start, end)
        return
    begun = start
    for match in _END.finditer(line):
        border = start + match.end()
        if _ABBREVIATION.search(text[max(begun, border - 12) : border]) or _is_quoted(text, begun, border):
            continue
        yield from _trimmed(text, begun, border)
        begun = border
    yield from _trimmed(text, begun, end)


def _is_quoted(text: str, start: int, border: int) -> bool:
    """Whether a quotation that began behind ``start`` is still open at ``border``."""
    closing: str | None = None
    for char in text[start:border]:
        if closing is None:
            closing = _QUOTES.get(char)
        elif char == closing:
            closing = None
    return closing is not None and border - start < _MAX_CHARS


def _trimmed(text: str, start: int, end: int) -> Iterator[Part]:
    """The part without white space around it; nothing where nothing else is there."""
    inner = text[start:end].strip()
    if inner:
        begun = text.index(inner[0], start) if inner else start
        yield begun, begun + len(inner)
