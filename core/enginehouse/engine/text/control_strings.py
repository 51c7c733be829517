"""Finds control-token strings in text, in time linear in its length however many there are.

Used on both sides of the worker link: to mark untrusted text before rendering
(:mod:`enginehouse.pipeline.prompt.markers`) and to split rendered text (:mod:`enginehouse.engine.text.segments`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

__all__ = ["ControlStrings", "control_strings"]


class ControlStrings:
    """A set of control-token strings, indexed by first character and length.

    Some models have thousands (Gemma about 6,400), where a regular expression of alternatives would
    try each of them at every ``<``; here a position costs one lookup per distinct length.
    """

    __slots__ = ("_any_first", "_following", "_lengths", "_longest", "_strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = frozenset(filter(None, strings))
        lengths: dict[str, set[int]] = {}
        following: dict[str, set[str]] = {}
        for string in self._strings:
            lengths.setdefault(string[0], set()).add(len(string))
            for cut in range(1, len(string)):
                following.setdefault(string[:cut], set()).add(string[cut])
        self._longest = max(map(len, self._strings), default=0)
        self._lengths = {first: sorted(several, reverse=True) for first, several in lengths.items()}
        self._following = following
        self._any_first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def __bool__(self) -> bool:
        return bool(self._strings)

    def __contains__(self, string: str) -> bool:
        return string in self._strings

    def find_all(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of the leftmost, longest, non-overlapping control-token strings.

        No control-token string lies in the text between two of them.
        """
        end = 0
        if self._any_first is None:
            return
        for candidate in self._any_first.finditer(text):
            start = candidate.start()
            if start < end:
                continue
            for length in self._lengths[text[start]]:
                found = text[start : start + length]
                if found in self._strings:
                    end = start + len(found)  # near the end of the text it is a shorter one
                    yield start, end
                    break

    def unfinished(self, text: str) -> tuple[int, frozenset[str]]:
        """How ``text`` could become a control-token string when something is written behind it.

        Returns:
            Start of the longest end of ``text`` that begins a control-token string (the length of ``text``
            if none does), and all characters that would continue one of its ends.
        """
        start, continuations = len(text), set[str]()
        for size in range(1, min(self._longest, len(text) + 1)):
            found = self._following.get(text[len(text) - size :])
            if found:
                start = len(text) - size
                continuations |= found
        return start, frozenset(continuations)


@lru_cache(maxsize=32)
def control_strings(strings: tuple[str, ...]) -> ControlStrings:
    """The index of ``strings``, kept for the models in use."""
    return ControlStrings(strings)
