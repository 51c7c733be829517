"""Session for all formats that write calls as JSON objects: between tags, after one, or bare.

A small state machine over the unread text. Each state reads from its front and returns True if the next state can
continue with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from enginehouse.contract.parsers import AnswerText, CallArguments, CallFinished, ToolPart
from enginehouse_parsers.call_object import CallObject
from enginehouse_parsers.json_value import WHITESPACE
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag

__all__ = ["JsonCallSession"]


class JsonCallSession:
    """Implements :class:`enginehouse.contract.parsers.ToolSession`.

    A call that is malformed before its arguments begin is text. One that is malformed later keeps the model's output,
    up to the closing tag: clients must validate arguments anyway. Closing tags inside strings are part of the
    arguments.

    Args:
        names: functions that may be called.
        opening: tags before one call, a JSON list of calls, or several calls.
        closing: the tag after them; None if there is none.
        ignored: tags without meaning, which are removed.
        bare: the answer may begin with a call without any tag.
    """

    def __init__(
        self,
        names: Collection[str],
        opening: tuple[str, ...],
        closing: str | None = None,
        ignored: tuple[str, ...] = (),
        bare: bool = False,
    ) -> None:
        self._names = names
        self._opening = opening
        self._closing = () if closing is None else (closing,)
        self._outer_tags = (*opening, *self._closing, *ignored)
        self._rest = ""  # unread text
        self._num_white = 0  # number of leading white space characters seen so far
        self._parts: list[ToolPart] = []
        self._call: CallObject | None = None
        self._in_list = False
        self._is_tagged = False
        self._state: Callable[[], bool] = self._beginning if bare else self._text

    def push(self, text: str) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        self._rest += text
        while self._rest and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`."""
        call = self._call
        if call is not None and not call.is_started:
            if not (is_cut and self._is_tagged):
                self._show(call.raw)
        elif call is not None and not call.is_finished:
            if self._rest and not is_remnant(self._rest, is_cut):
                self._parts.append(CallArguments(self._rest))
            self._parts.append(CallFinished())
        elif self._state in (self._text, self._beginning) and not is_remnant(self._rest, is_cut):
            self._show(self._rest)
        self._rest, self._call = "", None
        parts, self._parts = self._parts, []
        return parts

    # -- states ------------------------------------------------------------------------------------

    def _beginning(self) -> bool:
        """Only white space so far; a brace starts a call."""
        start = self._num_white = end_of_white(self._rest, self._num_white)
        if start == len(self._rest):
            return False
        self._num_white = 0
        if self._rest[start] == "{":
            self._rest = self._rest[start:]
            return self._body()
        self._state = self._text
        return True

    def _text(self) -> bool:
        """Prose up to the next opening tag."""
        shown, tag, self._rest = split_at_tag(self._rest, self._outer_tags)
        self._show(shown)
        if tag is None:
            return False
        if tag in self._opening:
            self._open()
        return True

    def _open(self) -> None:
        self._state, self._in_list, self._is_tagged = self._body, False, True

    def _body(self) -> bool:
        """Expect a call or a list of calls."""
        self._rest = self._rest.lstrip(WHITESPACE)
        if not self._rest:
            return False
        if self._rest[0] == "{":
            self._rest = self._rest[1:]
            self._call, self._state = CallObject(self._names, is_certain=self._is_tagged), self._object
        elif self._rest[0] == "[" and not self._in_list:
            self._in_list, self._rest = True, self._rest[1:]
        elif self._rest[0] == "]" and self._in_list:
            self._rest = self._rest[1:]
            self._state = self._after
            self._in_list = False
        else:
            self._state = self._other_body
        return True

    def _other_body(self) -> bool:
        """Text other than JSON after an opening tag: prose, whose tags are removed."""
        self._state = self._text
        return True

    def _object(self) -> bool:
        """Inside a call."""
        call = self._call
        assert call is not None
        self._rest = self._rest[call.feed(self._rest, self._parts) :]
        if call.status == "done":
            self._call, self._state = None, self._after
        elif call.status == "wrong":
            self._leave(call)
        return call.status != "open"

    def _leave(self, call: CallObject) -> None:
        """Continue after the position where a call became malformed."""
        if not call.is_started:
            self._call = None
            self._show(call.raw)
            self._state = self._text
        elif call.is_finished:
            self._call = None
            self._state = self._discard if self._closing else self._text
        else:
            self._state = self._broken

    def _broken(self) -> bool:
        """Malformed arguments: pass the model's output on up to the closing tag."""
        shown, tag, self._rest = split_at_tag(self._rest, self._closing)
        if shown:
            self._parts.append(CallArguments(shown))
        if tag is None:
            return False
        self._parts.append(CallFinished())
        self._call, self._state = None, self._text
        return True

    def _after(self) -> bool:
        """After a call: another one, the end of the list, or the closing tag."""
        has_separators = self._in_list or not self._closing
        start = self._num_white = end_of_white(self._rest, self._num_white, has_separators=has_separators)
        if start == len(self._rest):
            return False
        self._num_white, text = 0, self._rest[start:]
        if text[0] == "{" or (self._in_list and text[0] == "]"):
            self._rest, self._state = text, self._body
        else:
            self._state = self._discard if self._closing else self._text
        return True

    def _discard(self) -> bool:
        """Skip invalid text between a complete call and its closing tag."""
        _, tag, self._rest = split_at_tag(self._rest, (*self._closing, *self._opening))
        if tag is None:
            return False
        if tag in self._opening:
            self._open()
        else:
            self._state = self._text
        return True

    # -- output ------------------------------------------------------------------------------------

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(AnswerText(text))
