"""Reader of texts in quotation marks inside loose values: escapes of JSON and Python, line breaks, inner quotes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

from enginehouse_parsers.python_strings import read_escape
from enginehouse_parsers.value_writer import ValueWriter

__all__ = ["MORE", "TextReader"]

MORE = -1
"""Returned by a state that needs more text to go on."""

_WHITE = re.compile(r"\s+")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_KEY = re.compile(r"""(["'])[\w .-]{1,60}\1\s*:""")
_KEY_BEGINNING = re.compile(r"""["'][\w .-]{0,60}(?:["']\s{0,8})?""")
_UNICODE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}", re.ASCII)
_LONGEST_ESCAPE = 110


class TextReader(ValueWriter, ABC):
    """The states inside a text; :class:`enginehouse_parsers.loose_value.LooseValue` has the others.

    Args:
        ends: markers after the value.
        quotes: quotation marks besides the usual ones.
        positions: names of arguments in parentheses that are given without one.
        splits: hand the members of the outermost object out one by one.
    """

    def __init__(
        self, ends: tuple[str, ...], quotes: tuple[str, ...], positions: tuple[str, ...], *, splits: bool
    ) -> None:
        super().__init__(positions, splits=splits)
        self._ends, self._quotes = ends, quotes
        self._state: Callable[[str, int], int] = self._in_string
        self._quote = ""
        self._is_python = False
        self._is_last = False
        self._raw: list[str] = []  # read since an end marker in a text

    @abstractmethod
    def _colon(self, text: str, index: int) -> int:
        """State after a key."""

    @abstractmethod
    def _complete(self) -> None:
        """End a value."""

    @property
    def _is_in_call(self) -> bool:
        return bool(self._stack) and self._stack[0].is_call

    def _quote_at(self, text: str, index: int) -> str | None:
        """Return the quotation mark at a position, "" if there is none, None if more text is needed."""
        if text[index] in "'\"":
            return text[index]
        for quote in self._quotes:
            if text.startswith(quote, index):
                return quote
            if not self._is_last and quote.startswith(text[index:]):
                return None
        return ""

    def _open_string(self, text: str, index: int, quote: str) -> int:
        """Begin a text; three quotation marks are one."""
        end = index + len(quote)
        if quote in "'\"":
            if len(text) < end + 1 and not self._is_last:
                return MORE
            if text.startswith(quote, end):
                if len(text) < end + 2 and not self._is_last:
                    return MORE
                if text.startswith(quote, end + 1):
                    quote, end = quote * 3, end + 2
        self._begin_item()
        self._emit('"')
        self._quote = quote
        self._is_python = quote != '"' or self._is_in_call
        self._state = self._in_string
        return end

    def _in_string(self, text: str, index: int) -> int:
        found = _stops(self._quote, self._ends if self._key is None else ()).search(text, index)
        stop = len(text) if found is None else found.start()
        if stop > index:
            self._plain(text[index:stop])
            return stop
        char = text[index]
        if char == "\\":
            return self._escape(text, index)
        if text.startswith(self._quote, index):
            if self._key is not None:
                self._state = self._colon
            else:
                self._state, self._gap = self._closing, []
            return index + len(self._quote)
        if not self._is_last and self._quote.startswith(text[index:]):
            return MORE
        if self._key is None and self._doubt is None:
            for marker in self._ends:
                if text.startswith(marker, index):
                    self._doubt, self._raw = [], []
                    break
                if not self._is_last and marker.startswith(text[index:]):
                    return MORE
        self._plain(char)
        return index + 1

    def _escape(self, text: str, index: int) -> int:
        if self._is_python:
            return self._python_escape(text, index)
        kind = text[index + 1 : index + 2]
        size = 6 if kind == "u" else 2
        if len(text) < index + size and not self._is_last:
            return MORE
        if (kind and kind in _SIMPLE_ESCAPES) or (kind == "u" and _UNICODE_ESCAPE.match(text, index)):
            self._text(text[index : index + size])
            return index + size
        if kind == "'":
            self._text(kind)
            return index + 2
        self._text("\\\\")  # an escape that JSON does not know stays as it is
        return index + 1

    def _python_escape(self, text: str, index: int) -> int:
        found = read_escape(text[index : index + _LONGEST_ESCAPE], self._quote)
        if found is None:
            if not self._is_last:
                return MORE
            found = text[index:], len(text) - index
        self._plain(found[0])
        return index + found[1]

    def _closing(self, text: str, index: int) -> int:
        """After a quotation mark: it ends the text if what follows can follow a text."""
        char = text[index]
        if char.isspace():
            found = _WHITE.match(text, index)
            assert found is not None
            self._gap.append(found[0])
            return found.end()
        ends = self._ends_text(text, index)
        if ends is None:
            return MORE
        gap, self._gap = "".join(self._gap), []
        if ends:
            self._end_string()
            self._space(gap)
        elif char in "'\"" and self._stack and self._stack[-1].is_call:
            return self._join_string(text, index, char)  # Python joins texts that follow each other
        else:
            self._plain(self._quote + gap)
            self._state = self._in_string
        return index

    def _join_string(self, text: str, index: int, quote: str) -> int:
        self._quote, self._state = quote, self._in_string
        return index + 1

    def _ends_text(self, text: str, index: int) -> bool | None:
        """Return True if a text can have ended before this position; None if more text is needed."""
        char = text[index]
        if not self._stack or self._quote not in "'\"" or char in ",;":
            return True
        for marker in self._ends:  # some begin with a bracket
            if text.startswith(marker, index):
                return True
            if not self._is_last and marker.startswith(text[index:]):
                return None
        if char in "]})":
            return any(container.closer == char for container in self._stack)
        return self._is_next_key(text, index)

    def _is_next_key(self, text: str, index: int) -> bool | None:
        """Return True if a comment or the next member begins here, without a comma; None if more text is needed."""
        if text[index] == "/" and self._gap:
            following = text[index + 1 : index + 2]
            return None if not following and not self._is_last else following in ("/", "*")
        if text[index] not in "\"'" or self._stack[-1].is_call:
            return False
        if any("\n" in gap for gap in self._gap):
            return True
        if not self._is_last and _KEY_BEGINNING.fullmatch(text, index):
            return None
        return self._stack[-1].is_object and _KEY.match(text, index) is not None

    def _end_string(self) -> None:
        if self._doubt is not None:
            self.out += self._doubt
            self._doubt = None
        self._emit('"')
        self._complete()


@lru_cache(maxsize=256)
def _stops(quote: str, ends: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of characters that need attention in a text."""
    firsts = "".join(sorted({quote[0], *(marker[0] for marker in ends)}))
    return re.compile(f"[\\\\{re.escape(firsts)}]")
