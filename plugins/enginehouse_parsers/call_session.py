"""Session for all formats that a :class:`enginehouse_parsers.syntax.ToolSyntax` describes.

A small state machine, see :mod:`enginehouse_parsers.state_reader`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from enginehouse.contract.parsers import AnswerText, CallArguments, CallFinished, CallStarted, ToolPart
from enginehouse.contract.types import Tool
from enginehouse_parsers.call_object import CallObject
from enginehouse_parsers.loose_value import LooseValue
from enginehouse_parsers.state_reader import StateReader
from enginehouse_parsers.syntax import ID, INDEX, ToolSyntax, distinctive
from enginehouse_parsers.tagged_arguments import TaggedArguments
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag, token_at
from enginehouse_parsers.typed_values import TypedMembers

__all__ = ["CallSession"]

_FENCES = ("```json", "```python", "```tool_code", "```")
_RUN = re.compile(r"[\w.-]+", re.ASCII)
_ID = re.compile(r"[\w-]*", re.ASCII)
_MAX_HEAD_CHARS = 400
_PREFIX = "functions."


class _MoreNeeded(Exception):
    """The text ends inside something that must be read as a whole."""


class CallSession(StateReader[ToolPart]):
    """Implements :class:`enginehouse.contract.parsers.ToolSession`.

    A call that is malformed before its arguments begin is text. What is malformed later is read as what is plainly
    meant, so that arguments are valid JSON. An answer may begin with a call without any marker, if the call names a
    known function and has arguments.

    Args:
        syntax: how calls are written.
        tools: functions that may be called.
    """

    def __init__(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._syntax = syntax
        self._tools = {tool.name: tool for tool in tools}
        self._openers, self._closers = syntax.markers, syntax.after_calls
        self._heads = (*syntax.before_calls, *_FENCES)
        self._outer_tags = tuple(
            dict.fromkeys((*self._openers, *self._closers, *filter(distinctive, syntax.after_name), *syntax.ignored))
        )
        self._ends = (*self._closers, *self._openers, "```")
        self._raw: list[str] = []  # what was read since the beginning of the answer, if that is not marked as a call
        self._call: CallObject | None = None
        self._value: LooseValue | None = None
        self._members: TypedMembers | None = None
        self._in_list = self._is_tagged = self._is_last = self._is_cut = False
        self._state = self._beginning
        self._tool: Tool | None = None
        self._tagged: TaggedArguments | None = None

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        self._is_last, self._is_cut = True, is_cut
        for _ in range(len(self._rest) + 2):
            self._read()
            if not self._end():
                break
        return self._taken()

    def _end(self) -> bool:
        """End what is open at the end of the text; returns True if text after it is to be read."""
        rest, self._rest = self._rest, ""
        if self._call is not None:
            return self._end_object(self._call, rest)
        if self._value is not None:
            self._rest = self._value.finish(rest)
            self._finish_value(self._value)
            return bool(self._rest)
        if self._tagged is not None:
            self._tagged.finish(rest, is_cut=self._is_cut)
            self._finish_tagged(self._tagged)
        elif self._state in (self._text, self._rejected, self._beginning):
            is_marker = rest in self._outer_tags  # which could have been the beginning of a longer one
            if not is_marker and not is_remnant(
                rest.lstrip() if self._state == self._beginning else rest, self._is_cut
            ):
                self._show(rest)
        elif self._state == self._body and not (self._is_cut and self._is_tagged):
            self._show("".join(self._raw) + rest)
        self._raw = []
        return False

    def _end_object(self, call: CallObject, rest: str) -> bool:
        if not call.is_started and self._is_cut and self._is_tagged:
            self._call = None
            return False
        self._rest = call.finish(rest, self._parts)
        self._call = None
        self._state = self._after
        if call.is_wrong or not call.is_started:
            self._rest, self._state = "".join((*self._raw, *call.raw)), self._text
            self._raw = []
        return bool(self._rest)

    # -- states of the text around calls -----------------------------------------------------------

    def _beginning(self) -> bool:
        """Only white space so far; a call may begin without a marker."""
        start = self._num_white = end_of_white(self._rest, self._num_white)
        if start == len(self._rest):
            return False
        self._num_white = 0
        text = self._rest[start:]
        if not self._is_last and any(fence.startswith(text) for fence in _FENCES):
            self._num_white = start
            return False
        is_call = text[0] == "{" or text.startswith("```") or (text[0] == "[" and not self._starts_marker(text))
        text_start = self._syntax.text_start
        if text_start and text.startswith(text_start):
            self._rest, self._state = text[len(text_start) :], self._text
            return True
        if not self._is_last and text_start.startswith(text):
            self._num_white = start
            return False
        if text[0] == "[" and len(text) == 1 and not self._is_last:
            self._num_white = start
            return False
        if is_call or (self._syntax.kind in ("named", "tagged") and not self._syntax.first_marker):
            self._raw, self._rest = [self._rest[:start]], text
            self._is_tagged = self._in_list = False
            self._state = self._body
        else:
            self._state = self._text
        return True

    def _starts_marker(self, text: str) -> bool:
        return any(text.startswith(tag) or tag.startswith(text) for tag in self._outer_tags)

    def _text(self) -> bool:
        """Prose up to the next marker; markers are removed."""
        shown, tag, self._rest = split_at_tag(self._rest, self._outer_tags)
        self._show(shown)
        if tag is None:
            return False
        if tag in self._openers:
            self._open()
        return True

    def _open(self) -> None:
        self._state, self._in_list, self._is_tagged, self._raw = self._body, False, True, []

    def _body(self) -> bool:
        """Expect a call, a list of calls, or further markers before one."""
        white = end_of_white(self._rest, 0, has_separators=self._is_tagged)
        if white:
            self._skip(white)
        if not self._rest:
            return False
        try:
            token = self._token_at(self._heads) or self._token_at(self._closers)
            if token:
                return self._take_token(token)
            char = self._rest[0]
            if char == "{":
                self._call = CallObject(self._tools, self._ends, is_certain=self._is_tagged)
                self._state = self._object
                return True
            if char in "[]":
                return self._bracket(char)
            return self._head()
        except _MoreNeeded:
            return False

    def _take_token(self, token: str) -> bool:
        if token in self._closers and token not in self._heads:
            if not self._is_tagged:
                return self._give_up()
            self._rest, self._state = self._rest[len(token) :], self._text
            return True
        if token in self._openers:
            self._is_tagged, self._raw = True, []
        self._skip(len(token))
        return True

    def _bracket(self, char: str) -> bool:
        if (char == "[") == self._in_list:
            return self._give_up()
        self._skip(1)
        self._in_list = char == "["
        if char == "]":
            self._state = self._after if self._is_tagged else self._text
            if not self._is_tagged:
                return self._give_up()
        return True

    def _give_up(self) -> bool:
        """Read on as prose: this is not a call. What a limit cut may have become one, and is dropped."""
        if self._is_last and self._is_cut and self._is_tagged:
            self._rest, self._state = "", self._text
            return False
        self._rest, self._raw = "".join((*self._raw, self._rest)), []
        self._state = self._rejected if self._is_tagged else self._text
        return True

    def _rejected(self) -> bool:
        """Inside what looked like a call: prose, from which the markers inside calls are removed as well."""
        shown, tag, self._rest = split_at_tag(self._rest, (*self._outer_tags, *self._syntax.inner_markers))
        self._show(shown)
        if tag is None:
            return False
        if tag in self._openers:
            self._open()
        elif tag in self._closers:
            self._state = self._text
        return True

    def _skip(self, size: int) -> None:
        if not self._is_tagged:
            self._raw.append(self._rest[:size])
        self._rest = self._rest[size:]

    def _token_at(self, tokens: Sequence[str], position: int = 0) -> str:
        """Return the longest of the tokens at a position, "" if there is none.

        Raises:
            _MoreNeeded: one of them may begin there.
        """
        written = (token for token in tokens if token not in (ID, INDEX))
        found = token_at(self._rest, position, written, is_last=self._is_last)
        if found is None:
            raise _MoreNeeded
        return found

    def _after(self) -> bool:
        """After a call: another one, the end of the list, or a marker."""
        separators = self._in_list or self._is_tagged or not self._closers
        start = self._num_white = end_of_white(self._rest, self._num_white, has_separators=separators)
        if start == len(self._rest):
            return False
        text = self._rest[start:]
        try:
            token = self._token_at((*self._closers, *self._openers, *_FENCES), start)
        except _MoreNeeded:
            return False
        self._num_white = 0
        if token:
            self._rest = text if token in self._openers else text[len(token) :]
            self._state = self._text
            return True
        if text[0] in "}])":
            self._in_list = self._in_list and text[0] != "]"
            self._rest = text[1:]
            return True
        if self._may_go_on(text):
            self._rest, self._state, self._raw = text, self._body, []
            self._is_tagged = self._is_tagged or text[0] == "{"
            return True
        self._state = self._discard if self._closers and self._is_tagged else self._text
        return True

    def _may_go_on(self, text: str) -> bool:
        """True if another call may follow without a marker."""
        if text[0] in "{[":
            return True
        has_no_marker = self._in_list or not self._syntax.call_start.strip()
        return has_no_marker and self._syntax.kind in ("keywords", "named") and _RUN.match(text) is not None

    def _discard(self) -> bool:
        """Skip invalid text between a complete call and the marker after it."""
        _, tag, self._rest = split_at_tag(self._rest, (*self._closers, *self._openers))
        if tag is None:
            return False
        if tag in self._openers:
            self._open()
        else:
            self._state = self._text
        return True

    # -- states of a call --------------------------------------------------------------------------

    def _object(self) -> bool:
        """Inside a call that is an object."""
        call = self._call
        assert call is not None
        size = call.feed(self._rest, self._parts)
        self._rest = self._rest[size:]
        if call.is_wrong:
            self._call = None
            self._rest = "".join((*self._raw, *call.raw, self._rest))
            self._raw, self._state = [], self._text
            return True
        if call.is_started:
            self._raw = []
        if call.is_done:
            self._call, self._state = None, self._after
            return True
        return False

    def _head(self) -> bool:
        """Expect the name of a function and what follows it."""
        start = len(self._rest) - len(self._rest.lstrip("\"':"))
        if start >= _MAX_HEAD_CHARS:
            return self._give_up()
        run = _RUN.match(self._rest, start, start + _MAX_HEAD_CHARS)
        if run is None:
            if start == len(self._rest) and not self._is_last:
                raise _MoreNeeded
            return self._give_up()
        is_open = run.end() == len(self._rest) < start + _MAX_HEAD_CHARS and not self._is_last
        if is_open and self._may_be_name(run[0]):
            raise _MoreNeeded
        name = run[0] if run[0] in self._tools else run[0].removeprefix(_PREFIX)
        if ID in self._syntax.before_calls and name not in self._tools:
            return self._skip_id(run.end())
        if name not in self._tools or self._syntax.kind == "object":
            return self._give_up()
        end, is_marked = self._after_name(run.end())
        opening = self._opening(end)
        if not opening and not is_marked:
            return self._give_up()
        self._rest, self._tool, self._raw = self._rest[end:], self._tools[name], []
        self._parts.append(CallStarted(name))
        if opening in ("{", "("):
            self._begin_arguments()
        elif self._syntax.kind != "tagged":
            self._finish_call("{}")
        else:
            self._tagged, self._state = TaggedArguments(self._syntax, self._tools[name]), self._parameters
        return True

    def _may_be_name(self, text: str) -> bool:
        """True if a text is the beginning of a name, or of an id before one."""
        if ID in self._syntax.before_calls:
            return True
        names = (f"{prefix}{name}" for name in self._tools for prefix in ("", _PREFIX))
        return self._syntax.kind != "object" and any(name.startswith(text) for name in names)

    def _skip_id(self, end: int) -> bool:
        """Skip an id that a marker follows."""
        if not self._token_at(self._heads, end):
            return self._give_up()
        self._skip(end)
        return True

    def _after_name(self, end: int) -> tuple[int, bool]:
        """Return where the text after a name ends, and True if a marker is in it."""
        is_marked = False
        tokens = (*self._syntax.after_name, *_FENCES)
        while end < _MAX_HEAD_CHARS:
            white = self._end_of_gap(end)
            if self._rest[white : white + 1] in ("'", '"'):
                white = self._end_of_gap(white + 1)
            token = self._token_at(tokens, white)
            if token:
                is_marked = is_marked or token in self._syntax.after_name
                if self._syntax.kind == "tagged" and (token,) == self._syntax.after_name[-1:]:
                    return white + len(token), True
                end = white + len(token)
                continue
            if (ID in tokens or INDEX in tokens) and self._rest[white : white + 1] not in ("{", ""):
                run = _ID.match(self._rest, white + (self._rest[white] == ":"))
                assert run is not None
                if run.end() == len(self._rest) and not self._is_last:
                    raise _MoreNeeded
                if run.end() > end:
                    end = run.end()
                    continue
            break
        if not is_marked and self._syntax.name_end.strip() and not self._is_last and len(self._rest) == end:
            raise _MoreNeeded
        return end, is_marked

    def _end_of_gap(self, start: int) -> int:
        """Return where white space inside a head ends; more than a head may have ends it as well."""
        return min(end_of_white(self._rest, start), start + _MAX_HEAD_CHARS)

    def _opening(self, end: int) -> str:
        """Return what follows a head: a bracket or a marker; "" if it is something else.

        Raises:
            _MoreNeeded: it has not arrived.
        """
        start = self._end_of_gap(end)
        if start == len(self._rest):
            if not self._is_last:
                raise _MoreNeeded
            return ""
        char = self._rest[start]
        if char == "{" or (char == "(" and self._syntax.kind == "keywords"):
            return char
        if self._syntax.kind == "keywords":
            return ""
        tags = [tag.strip() for tag in (*self._ends, self._syntax.parameter_start) if tag.strip()]
        return self._token_at(tags, start)

    def _begin_arguments(self) -> None:
        """Begin arguments that are one value; white space before it is skipped."""
        self._rest = self._rest[end_of_white(self._rest, 0) :]
        assert self._tool is not None
        positions = tuple(self._properties)
        self._members = TypedMembers(self._tool) if self._syntax.is_untyped else None
        self._value = LooseValue(self._ends, self._syntax.quotes, positions, splits=self._syntax.is_untyped)
        self._state = self._arguments

    def _arguments(self) -> bool:
        """Inside arguments that are one value."""
        value = self._value
        assert value is not None
        self._rest = self._rest[value.feed(self._rest) :]
        if value.is_done:
            self._finish_value(value)
            return True
        self._give(value)
        return False

    def _finish_value(self, value: LooseValue) -> None:
        self._give(value)
        self._value = None
        self._finish_call(self._members.end() if self._members is not None else "")

    def _give(self, value: LooseValue) -> None:
        pieces, value.out = value.out, []
        if self._members is not None:
            self._add(self._members.written(pieces))
        else:
            self._add("".join(piece for piece in pieces if isinstance(piece, str)))

    def _finish_call(self, arguments: str = "") -> None:
        self._add(arguments)
        self._parts.append(CallFinished())
        self._tool, self._state = None, self._after

    @property
    def _properties(self) -> dict[str, Any]:
        assert self._tool is not None
        properties = self._tool.parameters.get("properties")
        return properties if isinstance(properties, dict) else {}

    def _parameters(self) -> bool:
        """Inside arguments between tags."""
        tagged = self._tagged
        assert tagged is not None
        self._rest = tagged.feed(self._rest, is_last=self._is_last)
        if tagged.is_object:
            self._tagged = None
            self._begin_arguments()
            return True
        self._add("".join(tagged.out))
        tagged.out = []
        if tagged.is_done:
            self._finish_tagged(tagged)
        return tagged.is_done

    def _finish_tagged(self, tagged: TaggedArguments) -> None:
        self._tagged = None
        self._finish_call("".join(tagged.out))

    # -- output ------------------------------------------------------------------------------------

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(text))

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(AnswerText(text))
