"""Strict incremental parser of one JSON value that detects its end and errors.

Used for the arguments of calls, which are passed on before they are complete. Uses a stack instead of recursion, so
that deep nesting costs memory only.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["WHITESPACE", "JsonValue"]

WHITESPACE = " \t\n\r"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = ("true", "false", "null")
_HEX = frozenset("0123456789abcdefABCDEF")
_OPENED_BY = {"}": "{", "]": "["}

_State = Literal["value", "value or end", "key or end", "key", "colon", "after", "string", "escape", "hex", "word"]


class JsonValue:
    """One value, from its first character on.

    Attributes:
        status: ``open`` while more may come, ``done`` when it is complete, ``wrong`` if it is invalid. A number at the
            outermost level is complete when another character follows it.
    """

    def __init__(self) -> None:
        self.status: Literal["open", "done", "wrong"] = "open"
        self._state: _State = "value"
        self._stack: list[str] = []  # open { and [
        self._in_key = False
        self._num_hex = 0
        self._word = ""

    def feed(self, text: str, start: int = 0) -> int:
        """Parse ``text`` from ``start``; return the position where the value ended or failed, or ``len(text)``."""
        index, end = start, len(text)
        while index < end and self.status == "open":
            index = self._step(text, index)
        return index

    def _step(self, text: str, index: int) -> int:
        """Parse at least one character, or end a number or literal before one."""
        if self._state == "string":
            return self._string(text, index)
        char = text[index]
        if self._state == "escape":
            self._state, self._num_hex = ("hex", 4) if char == "u" else ("string", 0)
            return self._checked(char in '"\\/bfnrtu', index)
        if self._state == "hex":
            self._num_hex -= 1
            self._state = "hex" if self._num_hex else "string"
            return self._checked(char in _HEX, index)
        if self._state == "word":
            return self._continue_word(char, index)
        if char in WHITESPACE:
            return index + 1
        return self._structure(char, index)

    def _string(self, text: str, index: int) -> int:
        plain = _PLAIN.match(text, index)
        if plain is not None:
            return plain.end()
        char = text[index]
        if char == "\\":
            self._state = "escape"
            return index + 1
        if char == '"':
            if self._in_key:
                self._in_key, self._state = False, "colon"
            else:
                self._complete()
            return index + 1
        return self._checked(False, index)  # an unescaped control character

    def _structure(self, char: str, index: int) -> int:
        """Parse anything outside strings, numbers and literals."""
        state = self._state
        if state == "colon":
            self._state = "value"
            return self._checked(char == ":", index)
        if state == "after" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
            return index + 1
        if char in _OPENED_BY and state in ("after", "key or end" if char == "}" else "value or end"):
            return self._close(_OPENED_BY[char], index)
        if state in ("value", "value or end"):
            return self._begin(char, index)
        self._in_key, self._state = True, "string"
        return self._checked(char == '"' and state != "after", index)

    def _begin(self, char: str, index: int) -> int:
        if char in "{[":
            self._stack.append(char)
            self._state = "key or end" if char == "{" else "value or end"
        elif char == '"':
            self._state = "string"
        else:
            self._state, self._word = "word", char
            return self._checked(char in "-0123456789" or char in "tfn", index)
        return index + 1

    def _continue_word(self, char: str, index: int) -> int:
        is_number = self._word[0] in "-0123456789"
        if is_number and char in _NUMBER_CHARS:
            self._word += char
            return index + 1
        if is_number:
            if _NUMBER.fullmatch(self._word) is None:
                return self._checked(False, index)
            self._complete()
            return index
        self._word += char
        if self._word in _LITERALS:
            self._complete()
            return index + 1
        return self._checked(any(literal.startswith(self._word) for literal in _LITERALS), index)

    def _close(self, opened: str, index: int) -> int:
        if not self._stack or self._stack[-1] != opened:
            return self._checked(False, index)
        self._stack.pop()
        self._complete()
        return index + 1

    def _complete(self) -> None:
        """End a value: the outermost one, or one inside a container."""
        self._state = "after"
        if not self._stack:
            self.status = "done"

    def _checked(self, is_right: bool, index: int) -> int:
        if is_right:
            return index + 1
        self.status = "wrong"
        return index
