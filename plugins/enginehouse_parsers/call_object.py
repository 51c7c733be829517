"""Incremental parser of one call written as a JSON object: ``{"name": "f", "arguments": {...}}``.

The members may come in any order, under the names that models use for them. The call starts once its name is known and
its arguments have started; until then the text may still turn out to be prose.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from enginehouse.contract.parsers import CallArguments, CallFinished, CallStarted, ToolPart
from enginehouse_parsers.loose_value import LooseValue
from enginehouse_parsers.value_writer import END_OF_MEMBER, Member, as_json, read_json

__all__ = ["CallObject", "object_text"]

_ARGUMENTS = frozenset({"arguments", "parameters", "args", "kwargs", "input"})
_NAMES = frozenset({"name", "tool_name", "function_name", "tool", "function"})
_KNOWN = frozenset({"id", "type", "tool_call_id", "call_id", "index"}) | _NAMES | _ARGUMENTS


class CallObject:
    """Parses the object from its opening brace on.

    Args:
        names: functions that may be called.
        is_certain: the surrounding text marks this as a call, so unknown members may be skipped, and arguments may be
            missing.
        ends: markers after the object.

    Attributes:
        is_wrong: it is not a call.
        is_started: its first part was handed out; not undone.
        raw: text read before the call started.
    """

    def __init__(self, names: Collection[str], ends: tuple[str, ...], *, is_certain: bool) -> None:
        self.is_wrong = self.is_started = False
        self.raw: list[str] = []
        self._value = LooseValue(ends, splits=True)
        self._names = names
        self._is_certain = is_certain
        self._key: str | None = None
        self._texts: list[str] = []  # of the current member, unless it is streamed
        self._streams = False
        self._name: str | None = None
        self._arguments: str | None = None  # complete arguments that wait for the name
        self._has_finished = False

    @property
    def is_done(self) -> bool:
        """True after the closing brace."""
        return self._value.is_done

    def feed(self, text: str, parts: list[ToolPart]) -> int:
        """Parse ``text``, appending to ``parts``; returns the number of characters consumed."""
        was_started = self.is_started
        end = self._value.feed(text)
        if not was_started:
            self.raw.append(text[:end])
        self._take(parts)
        return end

    def finish(self, rest: str, parts: list[ToolPart]) -> str:
        """End the object where the text ends; returns text that turned out to follow it."""
        if not self.is_started:
            self.raw.append(rest)
        rest = self._value.finish(rest)
        self._take(parts)
        return rest

    def _take(self, parts: list[ToolPart]) -> None:
        out, self._value.out = self._value.out, []
        for piece in out:
            if self.is_wrong:
                return
            if isinstance(piece, Member):
                self._begin_member(piece.name)
            elif piece is END_OF_MEMBER:
                self._end_member(parts)
            elif isinstance(piece, str):
                self._add(piece, parts)
        if self._value.is_done and not self.is_wrong and not self._has_finished:
            self._end(parts)

    def _begin_member(self, name: str) -> None:
        self._key, self._texts, self._streams = name, [], False
        if name not in _KNOWN and not self.is_started and not (self._is_certain or self._is_function(name)):
            self.is_wrong = True

    def _is_function(self, key: str) -> bool:
        """True if a member is a call by itself: its key is the function, its value the arguments."""
        return self._is_certain and self._name is None and self._arguments is None and key in self._names

    def _add(self, text: str, parts: list[ToolPart]) -> None:
        """Add a piece of the current member's value."""
        assert self._key is not None
        if not self._streams and not self._texts and text.startswith("{"):
            name = self._name if self._key in _ARGUMENTS and not self._has_finished else None
            name = self._key if self._is_function(self._key) else name
            if name is not None:
                self._streams = True
                self._start(name, parts)
        if self._streams:
            parts.append(CallArguments(text))
        else:
            self._texts.append(text)

    def _end_member(self, parts: list[ToolPart]) -> None:
        assert self._key is not None
        if self._streams:
            self._streams = False
            self._finish(parts)
        elif not self.is_started and (self._key in _NAMES | _ARGUMENTS):
            text = "".join(self._texts)
            try:
                value = {} if self._key in _ARGUMENTS and text.startswith("{") else read_json(text)
            except ValueError:  # a number or nesting without bounds
                self.is_wrong = True
                return
            if self._key in _ARGUMENTS:
                self._take_arguments(value, parts)
            else:
                self._take_name(value, parts)

    def _take_name(self, value: Any, parts: list[ToolPart]) -> None:
        if isinstance(value, dict) and self._key in ("function", "tool"):  # as in OpenAI's API
            self._take_name(value.get("name"), parts)
            found = next((value[key] for key in _ARGUMENTS if key in value), None)
            if not self.is_wrong and found is not None:
                self._take_arguments(found, parts)
            return
        if isinstance(value, str) and value not in self._names:
            value = value.removeprefix("functions.")
        if self._key == "tool" and self._name is not None:
            return
        if not isinstance(value, str) or value not in self._names:
            self.is_wrong = not (self._key == "function" and value is None)
            return
        self._name = value
        if self._arguments is not None:
            self._send(self._arguments, parts)

    def _take_arguments(self, value: Any, parts: list[ToolPart]) -> None:
        """Process arguments that were not streamed: name missing, JSON in a string, or not an object."""
        if isinstance(value, str):
            text = object_text(value)
        elif isinstance(value, dict):
            text = "".join(self._texts) if self._key in _ARGUMENTS else as_json(value)
        else:
            text = "{}" if value is None else None
        if text is None:
            self.is_wrong = True
        elif self._name is None:
            self._arguments = text
        else:
            self._send(text, parts)

    def _send(self, arguments: str, parts: list[ToolPart]) -> None:
        assert self._name is not None
        self._start(self._name, parts)
        parts.append(CallArguments(arguments))
        self._finish(parts)

    def _start(self, name: str, parts: list[ToolPart]) -> None:
        self.is_started = True
        self._has_finished = False
        parts.append(CallStarted(name))

    def _finish(self, parts: list[ToolPart]) -> None:
        self._has_finished = True
        parts.append(CallFinished())

    def _end(self, parts: list[ToolPart]) -> None:
        self._has_finished = True
        if self.is_started:
            return
        if self._name is None or not self._is_certain:
            self.is_wrong = True
        else:
            self._send("{}", parts)


def object_text(text: str) -> str | None:
    """Return the object that a text holds as JSON; "{}" for an empty text, None if it holds something else."""
    text = text.strip().encode("utf-8", "replace").decode()
    if not text:
        return "{}"
    value = LooseValue()
    if not text.startswith("{") or value.finish(text).strip():
        return None
    return "".join(piece for piece in value.out if isinstance(piece, str))
