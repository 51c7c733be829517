"""Cuts a text with many special tokens where llama.cpp cuts it too, since its own way takes quadratic time.

Before anything else llama.cpp parts a text at its special tokens: the longest first, each from the left, in what those
before left over. For every token that it finds it counts through the list of all parts so far, so 160,000 control
tokens took 44 s. What stands between two cuts is tokenized by itself. Hence a text that is cut where one of those
tokens certainly begins has the same tokens in pieces as it has as a whole.

Which tokens those are is decided in clusters: stretches of text that occurrences cover without a gap. No occurrence
crosses the border of a cluster, so what llama.cpp does in one depends on nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["TOKENS_PER_PIECE", "SpecialSplits"]

TOKENS_PER_PIECE = 32


class SpecialSplits:
    """The special tokens that one vocabulary looks for in text.

    Args:
        strings: their texts.
        strips: whether some take white space along that follows them; then it is not certain that a token which
            begins with white space is found.
    """

    def __init__(self, strings: Iterable[str], strips: bool = False) -> None:
        self._strings = frozenset(filter(None, strings))
        self._strips = strips
        lengths: dict[str, set[int]] = {}
        self._by_first: dict[str, list[str]] = {}
        for string in self._strings:
            lengths.setdefault(string[0], set()).add(len(string))
            self._by_first.setdefault(string[0], []).append(string)
        self._lengths = {first: sorted(several, reverse=True) for first, several in lengths.items()}
        self._any_first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def pieces(self, text: str) -> Iterator[str]:
        """``text`` in pieces with at most some hundred special tokens each."""
        done = 0
        for number, start in enumerate(self._starts(text), 1):
            if number % TOKENS_PER_PIECE == 0:
                yield text[done:start]
                done = start
        yield text[done:]

    def _starts(self, text: str) -> Iterator[int]:
        """Where special tokens certainly begin, in ascending order."""
        begin = first_end = end = 0  # of a cluster, and of the longest occurrence where it begins
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
            if text[start : start + length] in self._strings and start + length <= len(text):
                return length
        return 0

    def _starts_in(self, text: str, begin: int, first_end: int, end: int) -> Iterator[int]:
        """Those of one cluster."""
        if begin == end or (self._strips and any(map(str.isspace, text[begin:end]))):
            return
        if first_end == end:
            yield begin  # the first one holds all others, so it is the longest
            return
        yield from (begin + start for start in self._search(text[begin:end]))

    def _search(self, cluster: str) -> list[int]:
        """What llama.cpp finds in a cluster; nothing where it may count in which order equally long tokens come."""
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
