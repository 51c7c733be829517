"""Mistral's newer call format ``[TOOL_CALLS]name[ARGS]{...}``, next to the older JSON list."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from enginehouse.contract.parsers import CallArguments, CallFinished, CallStarted, ToolPart
from enginehouse_parsers.json_calls import JsonCallSession
from enginehouse_parsers.json_value import JsonValue

__all__ = ["NamedCallSession"]

_HEAD = re.compile(r"([\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
_BEGINNING = re.compile(r"[\w.-]+(?:\[[\w\]]*)?(?:\[[A-Z]*\]?)?\s*", re.ASCII)
_MAX_HEAD_CHARS = 200


class NamedCallSession(JsonCallSession):
    """Extends :class:`enginehouse_parsers.json_calls.JsonCallSession`; a body may also be a name and an object."""

    def __init__(self, names: Collection[str], opening: str) -> None:
        super().__init__(names, (opening,), ignored=("[ARGS]", "[CALL_ID]"))
        self._arguments: JsonValue | None = None
        self._is_broken = False

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        if self._state == self._other_body:  # the beginning of a name
            self._rest = "" if is_cut else self._rest
            self._state = self._text  # this state drops the tags after the name
            while self._rest and self._state():
                pass
        elif self._arguments is not None:
            self._parts.append(CallFinished())
            self._arguments = None
        return super().flush(is_cut)

    def _other_body(self) -> bool:
        """Parse a name and its arguments; anything else is prose."""
        head = _HEAD.match(self._rest)
        if head is not None and head[1] in self._names:
            self._parts.append(CallStarted(head[1]))
            self._rest = self._rest[head.end() :]
            self._arguments, self._is_broken, self._state = JsonValue(), False, self._named
            return True
        if head is None and len(self._rest) < _MAX_HEAD_CHARS and _BEGINNING.fullmatch(self._rest):
            return False
        self._state = self._text
        return True

    def _named(self) -> bool:
        """Parse the arguments; malformed ones extend to the end, because no tag closes them."""
        value = self._arguments
        assert value is not None
        end = len(self._rest) if self._is_broken else value.feed(self._rest)
        self._is_broken = self._is_broken or value.status == "wrong"
        if end:
            self._parts.append(CallArguments(self._rest[:end]))
            self._rest = self._rest[end:]
        if value.status == "done":
            self._parts.append(CallFinished())
            self._arguments, self._state = None, self._after
            return True
        return self._is_broken and bool(self._rest)
