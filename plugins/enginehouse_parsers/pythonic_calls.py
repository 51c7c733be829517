"""Parses calls written as a Python list: ``[f(a=1, b='x'), g()]``. Arguments are emitted as JSON, one by one.

An argument that is a text is emitted while it arrives, escape by escape.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from enginehouse.contract.parsers import AnswerText, CallArguments, CallFinished, CallStarted, ToolPart
from enginehouse_parsers.json_value import WHITESPACE
from enginehouse_parsers.python_strings import read_escape
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag

__all__ = ["LiteralScanner", "PythonicCallSession", "read_literal"]

# Possessive quantifiers prevent backtracking: a model may write white space for a long time.
_NAME = re.compile(r"\s*+([\w.-]++)\s*+\(", re.ASCII)
_NAME_BEGINNING = re.compile(r"\s*+([\w.-]*+)\s*+", re.ASCII)
_KEYWORD = re.compile(r"\s*+(?:([^\W\d]\w*+)\s*+=(?!=)|(\*\*))\s*+")
_KEYWORD_BEGINNING = re.compile(r"\s*+(?:(?:[^\W\d]\w*+)?\s*+=?|\*{0,2})\s*+")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_NAME_CHARS = 200


class LiteralScanner:
    """Finds the comma or parenthesis that ends an argument, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._quote = ""
        self._escaped = False

    def find_end(self, text: str, start: int) -> int:
        """Return the position of the end in ``text``, searching from ``start``; -1 if it has not arrived yet."""
        for index in range(start, len(text)):
            char = text[index]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in _CLOSING:
                self._stack.append(_CLOSING[char])
            elif not self._stack and char in ",)":
                return index
            elif self._stack and char == self._stack[-1]:
                self._stack.pop()
        return -1


def read_literal(text: str) -> Any:
    """Return the value of a JSON or Python literal.

    Raises:
        ValueError: it is neither, or has no JSON form.
    """
    try:
        try:
            value = json.loads(text)
        except ValueError:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about backslashes that Python keeps
                value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a literal") from error
    return value


class PythonicCallSession:
    """Implements :class:`enginehouse.contract.parsers.ToolSession`. Lists are calls at the beginning or after a tag.

    Text that is malformed before the first call's parenthesis is prose; malformed text inside a call stays in its
    arguments.

    Args:
        names: functions that may be called.
        opening: tags before a list.
        closing: tags after one.
    """

    def __init__(self, names: Collection[str], opening: tuple[str, ...] = (), closing: tuple[str, ...] = ()) -> None:
        self._names = names
        self._opening = opening
        self._tags = (*opening, *closing)
        self._rest = ""  # unread text
        self._num_white = 0  # number of leading white space characters seen so far
        self._raw = ""  # consumed text that becomes prose if no call begins
        self._parts: list[ToolPart] = []
        self._state: Callable[[], bool] = self._beginning
        self._is_open = False
        self._num_arguments = 0
        self._scanner = LiteralScanner()
        self._num_scanned = 0
        self._spreads = False
        self._quote = ""  # the one that ends the open text

    def push(self, text: str) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        self._rest += text
        while self._rest and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        if self._is_open:
            self._add(self._rest)
            self._parts.append(CallFinished())
        elif self._state != self._text or not is_remnant(self._rest, is_cut):
            self._show(self._raw + self._rest)
        self._rest, self._raw, self._is_open = "", "", False
        parts, self._parts = self._parts, []
        return parts

    # -- states ------------------------------------------------------------------------------------

    def _beginning(self) -> bool:
        """Only white space so far; a bracket may start a list of calls."""
        start = self._num_white = end_of_white(self._rest, self._num_white)
        if start == len(self._rest):
            return False
        self._num_white = 0
        if self._rest[start] == "[":
            self._raw, self._rest, self._state = "[", self._rest[start + 1 :], self._name
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        """Prose up to the next tag; tags are removed."""
        shown, tag, self._rest = split_at_tag(self._rest, self._tags)
        self._show(shown)
        if tag in self._opening:
            self._state = self._beginning
        return tag is not None

    def _name(self) -> bool:
        """Expect a function name and its parenthesis."""
        found = _NAME.match(self._rest)
        if found is not None and found[1] in self._names:
            self._parts.append(CallStarted(found[1]))
            self._rest, self._raw = self._rest[found.end() :], ""
            self._is_open, self._num_arguments, self._state = True, 0, self._keyword
            return True
        if found is None and self._may_be_name():
            return False
        self._raw, shown = "", self._raw
        self._show(shown)
        self._state = self._text
        return True

    def _may_be_name(self) -> bool:
        if len(self._rest) > _MAX_NAME_CHARS + max(map(len, self._names), default=0):
            return False
        beginning = _NAME_BEGINNING.fullmatch(self._rest)
        return beginning is not None and any(name.startswith(beginning[1]) for name in self._names)

    def _keyword(self) -> bool:
        """Expect an argument's name, two stars, or the closing parenthesis."""
        text = self._rest = self._rest.lstrip(WHITESPACE)
        if text[:1] == ")":
            self._rest = text[1:]
            self._close()
            return True
        found = _KEYWORD.match(text)
        # White space after the sign belongs to the match, so the value must have started.
        if found is not None and found.end() < len(text):
            self._spreads = found[2] is not None
            if not self._spreads:
                self._add(f"{', ' if self._num_arguments else '{'}{json.dumps(found[1], ensure_ascii=False)}: ")
                self._num_arguments += 1
            self._rest, self._scanner, self._num_scanned = text[found.end() :], LiteralScanner(), 0
            self._state = self._value
            return True
        if len(text) < _MAX_NAME_CHARS and _KEYWORD_BEGINNING.fullmatch(text):
            return False
        self._state = self._broken
        return True

    def _value(self) -> bool:
        """An argument's value, complete at a comma or parenthesis; a text is read by :meth:`_string`."""
        if not self._num_scanned and not self._spreads and self._rest[0] in "'\"":
            if len(self._rest) < 2:
                return False
            if self._rest[1] != self._rest[0]:  # else it is empty, or has three quotes
                self._quote, self._rest, self._state = self._rest[0], self._rest[1:], self._string
                self._add('"')
                return True
        end = self._scanner.find_end(self._rest, self._num_scanned)
        if end < 0:
            self._num_scanned = len(self._rest)
            return False
        try:
            value = read_literal(self._rest[:end])
            if self._spreads:
                self._spread(value)
            else:
                self._add(_dump(value))
        except ValueError:
            self._state = self._broken
            return True
        self._rest = self._rest[end:]
        if self._rest[0] == ",":
            self._rest, self._state = self._rest[1:], self._keyword
        else:
            self._state = self._keyword
        return True

    def _string(self) -> bool:
        """Inside a text, up to its quote."""
        stops = [stop for char in (self._quote, "\\") if (stop := self._rest.find(char)) >= 0]
        stop = min(stops, default=len(self._rest))
        self._add_text(self._rest[:stop])
        self._rest = self._rest[stop:]
        if not self._rest:
            return False
        if self._rest[0] == self._quote:
            self._rest, self._state = self._rest[1:], self._after_string
            return True
        found = read_escape(self._rest, self._quote)
        if found is None:
            return False
        text, size = found
        self._add_text(text)
        self._rest = self._rest[size:]
        return True

    def _after_string(self) -> bool:
        """After a text: the end of the argument, or a text that continues it, as in Python."""
        text = self._rest = self._rest.lstrip(WHITESPACE)
        if not text:
            return False
        if text[0] in "'\"":
            self._quote, self._rest, self._state = text[0], text[1:], self._string
            return True
        self._add('"')
        self._state = self._keyword if text[0] in ",)" else self._broken
        if text[0] == ",":
            self._rest = text[1:]
        return True

    def _spread(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError("only a dict can be spread")
        for name, item in value.items():
            self._add(f"{', ' if self._num_arguments else '{'}{_dump(str(name))}: {_dump(item)}")
            self._num_arguments += 1

    def _close(self) -> None:
        self._add("}" if self._num_arguments else "{}")
        self._parts.append(CallFinished())
        self._is_open, self._state = False, self._between

    def _between(self) -> bool:
        """After a call: another one, or the end of the list."""
        start = self._num_white = end_of_white(self._rest, self._num_white)
        if start == len(self._rest):
            return False
        self._num_white = 0
        text = self._rest[start:]
        if text[0] == ",":
            self._rest, self._raw, self._state = text[1:], ",", self._name
        else:
            self._rest, self._state = text.removeprefix("]"), self._text
        return True

    def _broken(self) -> bool:
        """Malformed call: keep the model's output in its arguments."""
        self._add(self._rest)
        self._rest = ""
        return False

    # -- output ------------------------------------------------------------------------------------

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(text))

    def _add_text(self, text: str) -> None:
        self._add(_dump(text)[1:-1])

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(AnswerText(text))


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent
