"""Method ``lossless``: removes insignificant white space and repeated paragraphs.

Removes only redundant text. Lines that may be code, tables or quotations keep their white space, which may be
significant there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from enginehouse.contract.compressor import CompressibleText, CompressionTask, CompressionTools, Range, joined

__all__ = ["LosslessCompressor"]

_MIN_REPEATED_CHARS = 40  # shorter paragraphs, such as headings, may be repeated on purpose
_LINE_END = re.compile(r"(?<![ \t])[ \t]++(?=\n|\Z)")
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*+\n){2,}")
_SPACES = re.compile(r"(?<=\S)[ \t]{2,}+(?=\S)")
_MEANS_SOMETHING = re.compile("^(?: {4}|\t)|[|\t`\"'\u201c\u201d\u00ab\u00bb{}\\[\\]<>=\\\\]|^\\s*[-*+]\\s")


class LosslessCompressor:
    """Implements :class:`enginehouse.contract.compressor.Compressor`."""

    name = "lossless"
    api_version = 1
    is_budgeted = False
    is_idempotent = True
    needs_scores = False

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """See the contract."""
        return [_kept(text, number, tools) for number, text in enumerate(task.texts)]


def _kept(text: CompressibleText, number: int, tools: CompressionTools) -> list[Range]:
    seen: set[str] = set()
    kept: list[Range] = []
    for start, end in text.free():
        repeated = list(_repeated(text.text, start, end, seen))
        for range_ in repeated:
            tools.explain(number, range_, "a paragraph that occurs earlier in this text")
        removed = joined([*repeated, *_white_space(text.text, start, end)])
        bounds = [start, *(bound for range_ in removed for bound in range_), end]
        kept += [(left, right) for left, right in zip(bounds[::2], bounds[1::2], strict=True) if left < right]
    return kept


def _repeated(text: str, start: int, end: int, seen: set[str]) -> Iterator[Range]:
    """Yield paragraphs that occur earlier in this text, with the white space after them."""
    paragraphs = list(_paragraphs(text, start, end))
    following = [*(begin for begin, _ in paragraphs[1:]), end]
    for (begin, stop), next_begin in zip(paragraphs, following, strict=False):
        said = " ".join(text[begin:stop].split())
        if len(said) >= _MIN_REPEATED_CHARS:
            if said in seen:
                yield begin, next_begin
            seen.add(said)


def _paragraphs(text: str, start: int, end: int) -> Iterator[Range]:
    """Yield runs of non-blank lines."""
    begin: int | None = None
    for line_start, line_end in _lines(text, start, end):
        if text[line_start:line_end].strip():
            begin = line_start if begin is None else begin
        elif begin is not None:
            yield begin, line_start
            begin = None
    if begin is not None:
        yield begin, end


def _lines(text: str, start: int, end: int) -> Iterator[Range]:
    """Yield lines with their line ends."""
    while start < end:
        line_end = text.find("\n", start, end) + 1 or end
        yield start, line_end
        start = line_end


def _white_space(text: str, start: int, end: int) -> Iterator[Range]:
    """Yield insignificant white space: trailing, empty lines after the first, more than one space in prose."""
    for match in _LINE_END.finditer(text, start, end):
        if match.end() < end or match.end() == len(text):
            yield match.span()
    for match in _EMPTY_LINES.finditer(text, start, end):
        first = text.index("\n", match.start() + 1)
        yield first + 1, match.end()
    for line_start, line_end in _lines(text, start, end):
        if not _MEANS_SOMETHING.search(text[line_start:line_end].rstrip()):  # trailing white space is removed
            for match in _SPACES.finditer(text, line_start, line_end):
                yield match.start() + 1, match.end()
