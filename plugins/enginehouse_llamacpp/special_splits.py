"""Splits a text with many special tokens where llama.cpp splits it too, as its own algorithm takes quadratic time.

llama.cpp first splits a text at its special tokens: the longest first, each from the left, in the parts left over by
the previous ones. For every token found it walks the list of all parts so far, so 160,000 control tokens took 44 s.
The text between two splits is tokenized by itself. Hence a text that is split where one of those tokens certainly
begins has the same tokens in pieces as in one piece.

These positions are determined in clusters: stretches of text covered by occurrences without a gap. No occurrence
crosses the boundary of a cluster, so llama.cpp's result in one cluster depends on nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["TOKENS_PER_PIECE", "SpecialSplits"]

TOKENS_PER_PIECE = 32


class SpecialSplits:
    """Special tokens that one vocabulary searches for in text.

    Args:
        strings: their texts.
        strips: some tokens also consume the white space after them; then it is not certain that a token which begins
            with white space is found.
    """

    def __init__(self, strings: Iterable[str], strips: bool = False) -> None:
        self.strings = frozenset(filter(None, strings))
        self._strips = strips
        lengths: dict[str, set[int]] = {}
        self._by_first: dict[str, list[str]] = {}
        for string in self.strings:
            lengths.setdefault(string[0], set()).add(len(string))
            self._by_first.setdefault(string[0], []).append(string)
        self._lengths = {first: sorted(several, reverse=True) for first, several in lengths.items()}
        self._any_first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield ``text`` in pieces with at most a few hundred special tokens each."""
        done = 0
        for number, start in enumerate(self.starts(text), 1):
            if number % TOKENS_PER_PIECE == 0:
                yield text[done:start]
                done = start
        yield text[done:]

    def starts(self, text: str) -> Iterator[int]:
        """Yield the positions where special tokens certainly begin, in ascending order."""
        begin = first_end = end = 0  # of a cluster, and of the longest occurrence at its beginning
        for candidate in self._any_first.finditer(text) if self._any_first else ():
            start = candidate.start()
            occurrence_end = start + self._longest_at(text, start)
            if start >= end:
                yield from self._starts_in(text, begin, first_end, end)
                begin, first_end, end = start, occurrence_end, occurrence_end
            end = max(end, occurrence_end)
        yield from self._starts_in(text, begin, first_end, end)

    def _longest_at(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self.strings and start + length <= len(text):
                return length
        return 0

    def _starts_in(self, text: str, begin: int, first_end: int, end: int) -> Iterator[int]:
        """Yield the positions within one cluster."""
        if begin == end or (self._strips and any(map(str.isspace, text[begin:end]))):
            return
        if first_end == end:
            yield begin  # the first occurrence contains all others, so it is the longest
            return
        yield from (begin + start for start in self._search(text[begin:end]))

    def _search(self, cluster: str) -> list[int]:
        """Return llama.cpp's matches in a cluster; empty if the order of equally long tokens could matter."""
        found = [string for first in set(cluster) for string in self._by_first.get(first, ()) if string in cluster]
        if len({len(string.encode()) for string in found}) < len(found):
            return []
        gaps, starts = [(0, len(cluster))], list[int]()
        for string in sorted(found, key=lambda string: -len(string.encode())):
            left = list[tuple[int, int]]()
            for begin, end in gaps:
                done = begin
                while (start := cluster.find(string, done, end)) >= 0:
                    starts.append(start)
                    left.append((done, start))
                    done = start + len(string)
                left.append((done, end))
            gaps = [gap for gap in left if gap[0] < gap[1]]
        return sorted(starts)
