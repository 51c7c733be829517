"""Assigns the pieces of tool calls in a streamed answer to calls. Does not know choices or events.

Servers identify a call by its index, its id, both or neither, once or in each piece. Unambiguous information is used;
if a piece could belong to two calls, the answer ends with an error, because mixed arguments of two calls are worse
than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import define, field

__all__ = ["CallPiece", "CallPieces"]


_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


@define
class _Arguments:
    """Parse state of one call's arguments; one pass over their text.

    Attributes:
        has_begun, is_complete: the outermost object or list was opened, or closed.
    """

    has_begun: bool = False
    is_complete: bool = False
    _depth: int = 0
    _in_text: bool = False
    _num_escaped: int = 0

    def add(self, text: str) -> None:
        """Continue parsing; raises ValueError for text after a complete value."""
        at, self._num_escaped = self._num_escaped if text else 0, 0 if text else self._num_escaped
        while not self.is_complete and (found := (_INSIDE if self._in_text else _OUTSIDE).search(text, at)):
            sign, at = found[0], found.end()
            if self._in_text:
                self._in_text = sign != '"'
                at += sign == "\\"  # the escaped character is not significant
                self._num_escaped = max(0, at - len(text))
            elif sign == '"':
                self._in_text = self.has_begun
            else:
                self._depth += 1 if sign in "{[" else -1
                self.has_begun = True
                self.is_complete = self._depth <= 0
        if self.is_complete and text[at:].strip():
            raise ValueError("arguments follow a complete call, so two calls cannot be distinguished")


@define(eq=False)
class _Call:
    """State of one call."""

    position: int
    index: int | None
    id: str | None
    name: str
    arguments: _Arguments = field(factory=_Arguments)


@define(frozen=True)
class CallPiece:
    """A piece of a call: ``position`` counts the calls of the answer, ``name`` is set only on the first piece."""

    position: int
    name: str | None
    arguments: str


class CallPieces:
    """Calls of one choice, in order of their first pieces."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def __len__(self) -> int:
        """Number of calls."""
        return len(self._calls)

    def push(self, data: Mapping[str, Any]) -> CallPiece:
        """Parse ``data``, an entry of ``tool_calls``, and return its piece.

        Raises:
            KeyError, TypeError, ValueError: it is not a valid piece, or could belong to several calls.
        """
        function = data.get("function") or {}
        index, call_id = _index(data.get("index")), _text(data.get("id")) or None
        name, arguments = _text(function.get("name")), _text(function.get("arguments"))
        call = self._find(index, call_id, name, has_text=bool(arguments.strip()))
        is_new = call is None
        if call is None:
            if not name:
                raise KeyError("a call without a name")
            call = _Call(len(self._calls), index, call_id, name)
            self._calls.append(call)
        elif call.id is None:
            call.id = call_id
        call.arguments.add(arguments)
        return CallPiece(call.position, name if is_new else None, arguments)

    def check_ends(self) -> None:
        """Raise ValueError if calls that share an index, or have none, are incomplete: pieces may be mixed up."""
        indices = [call.index for call in self._calls]
        for call in self._calls:
            is_open = call.arguments.has_begun and not call.arguments.is_complete
            if is_open and indices.count(call.index) > 1:
                raise ValueError(f"the arguments of the call {call.name!r} have no end, and it shares its index")

    def _find(self, index: int | None, call_id: str | None, name: str, *, has_text: bool) -> _Call | None:
        """Return the call that a piece continues; None for a new one."""
        known = next((call for call in self._calls if call_id is not None and call.id == call_id), None)
        if known is not None:
            if index is not None and index != known.index:
                raise ValueError(f"the call {call_id!r} has the indices {known.index} and {index}")
            return known
        there = [call for call in self._calls if index is None or call.index == index]
        if not there:
            return None
        latest = there[-1]
        is_other_id = call_id is not None and latest.id is not None
        is_next = latest.arguments.is_complete and has_text
        if name and (is_other_id or is_next or name != latest.name or (index is None and call_id is not None)):
            return None
        if sum(not call.arguments.is_complete for call in there) > 1:
            raise ValueError("a piece of a call names neither its id nor an index of its own")
        return latest


def _index(value: Any) -> int | None:
    """Return the index of a call; some servers write it as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        return int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{value!r} instead of an index")
    return value


def _text(value: Any) -> str:
    """Return a text, or "" for None; raises TypeError for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value or ""
