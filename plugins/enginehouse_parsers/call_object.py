"""Incremental parser of one call written as a JSON object: ``{"name": "f", "arguments": {...}}``.

The members may come in any order. The call starts once its name is known and its arguments have started; until then the
text may still turn out to be prose.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from enginehouse.contract.parsers import CallArguments, CallFinished, CallStarted, ToolPart
from enginehouse_parsers.json_value import WHITESPACE, JsonValue

__all__ = ["CallObject"]

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = frozenset({"id", "name", "type"}) | _ARGUMENTS

_State = Literal["key or end", "key", "colon", "value", "after"]


class CallObject:
    """Parses the object after its opening brace.

    Args:
        names: functions that may be called.
        is_certain: the surrounding text marks this as a call, so unknown members may be skipped.

    Attributes:
        status: ``open``; ``done`` at the closing brace; ``wrong`` if it is not a call, or is malformed.
    """

    def __init__(self, names: Collection[str], is_certain: bool) -> None:
        self.status: Literal["open", "done", "wrong"] = "open"
        self.is_started = False
        self.is_finished = False
        self._raw = ["{"]
        self._names = names
        self._is_certain = is_certain
        self._state: _State = "key or end"
        self._value: JsonValue | None = None
        self._texts: list[str] = []  # of the current value, unless it is streamed
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # complete arguments that wait for the name

    def feed(self, text: str, parts: list[ToolPart]) -> int:
        """Parse ``text``, appending to ``parts``; returns the number of characters consumed."""
        index = 0
        while index < len(text) and self.status == "open":
            start, was_started = index, self.is_started
            index = self._read_value(text, index, parts) if self._value else self._read_structure(text, index, parts)
            if not was_started and not self.is_started:
                self._raw.append(text[start:index])
        return index

    @property
    def raw(self) -> str:
        """Text consumed before the call started, brace included."""
        return "".join(self._raw)

    @property
    def _streams(self) -> bool:
        """True if the current value is passed on as it arrives."""
        return self.is_started and not self.is_finished and self._key in _ARGUMENTS

    def _read_structure(self, text: str, index: int, parts: list[ToolPart]) -> int:
        char = text[index]
        if char in WHITESPACE:
            return index + 1
        if self._state == "value":
            return self._begin_value(char, index, parts)
        if char == '"' and self._state in ("key", "key or end"):
            self._value, self._texts = JsonValue(), []
            return index
        if char == "}" and self._state in ("key or end", "after"):
            self._end(parts)
            return index + 1
        if char == {"colon": ":", "after": ","}.get(self._state):
            self._state = "value" if self._state == "colon" else "key"
            return index + 1
        self.status = "wrong"
        return index

    def _begin_value(self, char: str, index: int, parts: list[ToolPart]) -> int:
        self._value, self._texts = JsonValue(), []
        if self._key in _ARGUMENTS and char == "{" and self._name is not None and not self.is_started:
            self._start(parts)
        return index

    def _read_value(self, text: str, index: int, parts: list[ToolPart]) -> int:
        value = self._value
        assert value is not None
        end = value.feed(text, index)
        if self._streams:
            if end > index:
                parts.append(CallArguments(text[index:end]))
        else:
            self._texts.append(text[index:end])
        if value.status == "wrong":
            self.status = "wrong"
        elif value.status == "done":
            self._value = None
            self._take(parts)
        return end

    def _take(self, parts: list[ToolPart]) -> None:
        """Process a complete key or value."""
        text = "".join(self._texts)
        if self._state in ("key", "key or end"):
            self._key, self._state = json.loads(text), "colon"
            if not self._is_certain and self._key not in _KNOWN:
                self.status = "wrong"
            return
        self._state = "after"
        if self._streams:
            self._finish(parts)
        elif not self.is_started and self._key == "name":
            self._take_name(text, parts)
        elif not self.is_started and self._key in _ARGUMENTS:
            self._take_arguments(text, parts)

    def _take_name(self, text: str, parts: list[ToolPart]) -> None:
        name = json.loads(text) if text.startswith('"') else None
        if name not in self._names:
            self.status = "wrong"
            return
        self._name = name
        if self._arguments is not None:
            self._send(self._arguments, parts)

    def _take_arguments(self, text: str, parts: list[ToolPart]) -> None:
        """Process arguments that were not streamed: name missing, JSON in a string, or not an object."""
        if text.startswith('"'):
            text = json.loads(text).encode("utf-8", "replace").decode()
            inner = JsonValue()
            if not text.startswith("{") or inner.feed(text) < len(text.rstrip(WHITESPACE)) or inner.status != "done":
                self.status = "wrong"
                return
        elif text == "null":
            return
        elif not text.startswith("{"):
            self.status = "wrong"
            return
        if self._name is None:
            self._arguments = text
        else:
            self._send(text, parts)

    def _send(self, arguments: str, parts: list[ToolPart]) -> None:
        self._start(parts)
        parts.append(CallArguments(arguments))
        self._finish(parts)

    def _start(self, parts: list[ToolPart]) -> None:
        assert self._name is not None
        self.is_started = True
        parts.append(CallStarted(self._name))

    def _finish(self, parts: list[ToolPart]) -> None:
        self.is_finished = True
        parts.append(CallFinished())

    def _end(self, parts: list[ToolPart]) -> None:
        if not self.is_started and self._name is None:
            self.status = "wrong"
            return
        if not self.is_started:
            self._send("{}", parts)
        self.status = "done"
