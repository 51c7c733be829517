"""Method ``lossless``: white space that says nothing, and paragraphs that have been said before.

Nothing goes that a reader would miss. Lines that may be code, tables or quotations keep their white space: there it may
mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from enginehouse.compression import CompressibleText, CompressionTask, CompressionTools, Range, joined

__all__ = ["LosslessCompressor"]

_MIN_REPEATED_CHARS = 40  # a shorter paragraph, such as a heading, may well stand twice
_PARAGRAPH = re.compile(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_SPACES = re.compile(r"(?<=\S)[ \t]{2,}(?=\S)")
_LINE_END = re.compile(r"[ \t]+(?=\n|\Z)")
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")
_MEANS_SOMETHING = re.compile(r"^(?: {4}|\t)|[|\t`\"'“”«»{}\[\]<>=\\]|^\s*[-*+]\s", re.MULTILINE)


class LosslessCompressor:
    """Implements :class:`enginehouse.compression.Compressor`."""

    name = "lossless"
    api_version = 1
    is_budgeted = False
    is_idempotent = True
    needs_scores = False

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """See the contract."""
        return [_kept(text) for text in task.texts]


def _kept(text: CompressibleText) -> list[Range]:
    seen: set[str] = set()
    kept: list[Range] = []
    for start, end in text.free():
        removed = joined([*_repeated(text.text, start, end, seen), *_white_space(text.text, start, end)])
        borders = [start, *(border for range_ in removed for border in range_), end]
        kept += [(left, right) for left, right in zip(borders[::2], borders[1::2], strict=True) if left < right]
    return kept


def _repeated(text: str, start: int, end: int, seen: set[str]) -> Iterator[Range]:
    """Paragraphs that stand in this text before, with the white space behind them."""
    for match in _PARAGRAPH.finditer(text, start, end):
        said = " ".join(match.group().split())
        if len(said) < _MIN_REPEATED_CHARS:
            continue
        if said in seen:
            behind = re.compile(r"\s*").match(text, match.end(), end)
            yield match.start(), behind.end() if behind else match.end()
        seen.add(said)


def _white_space(text: str, start: int, end: int) -> Iterator[Range]:
    """White space without a meaning: at the ends of lines, empty lines after the first, more than one space in prose."""
    for match in _LINE_END.finditer(text, start, end):
        if match.end() < end or match.end() == len(text):
            yield match.span()
    for match in _EMPTY_LINES.finditer(text, start, end):
        first = text.index("\n", match.start() + 1)
        yield first + 1, match.end()
    for match in _SPACES.finditer(text, start, end):
        line_start = max(text.rfind("\n", 0, match.start()) + 1, start)
        line_end = text.find("\n", match.end())
        line = text[line_start : end if line_end < 0 else min(line_end, end)]
        if not _MEANS_SOMETHING.search(line):
            yield match.start() + 1, match.end()
