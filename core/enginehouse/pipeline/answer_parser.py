"""Splits the text of one choice into reasoning, text and tool calls, independent of how the stream was chunked.

Used in the server, once per choice, for streamed and whole answers alike. The formats are plugins
(:mod:`enginehouse.contract.parsers`); this module implements the rules common to all of them: white space around calls,
the limit on the number of calls, and the fallback when a parser fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from enginehouse.contract.errors import PluginFailed
from enginehouse.contract.parsers import (
    AnswerPart,
    AnswerText,
    CallArguments,
    CallFinished,
    CallStarted,
    ReasoningFormat,
    ReasoningPart,
    ReasoningSession,
    ReasoningText,
    ToolFormat,
    ToolPart,
    ToolSession,
)
from enginehouse.contract.types import Tool
from enginehouse.plugins import are_foreign, guard_of, guarded


@frozen(kw_only=True)
class AnswerParsing:
    """Parser configuration for the answers of one request; a parser that is None is not used.

    Attributes:
        reasoning_is_open: the prompt ends inside reasoning.
        tools: functions that may be called.
        max_calls: further calls are dropped; None means no limit.
    """

    reasoning: ReasoningFormat | None = None
    reasoning_is_open: bool = False
    tool_format: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None

    @property
    def are_foreign(self) -> bool:
        """True if a parser is not our own, so that it is opened and called off the event loop."""
        return are_foreign(self.reasoning, self.tool_format)

    def open(self) -> AnswerParser | None:
        """Create a parser for one choice; None if its text is the answer unchanged."""
        if self.reasoning is None and self.tool_format is None:
            return None
        reasoning = None if self.reasoning is None else _open_reasoning(self.reasoning, self.reasoning_is_open)
        calls = None if self.tool_format is None else _Calls(_open_tools(self.tool_format, self.tools), self.max_calls)
        return AnswerParser(reasoning, calls)


class AnswerParser:
    """Parses one choice. Use :meth:`AnswerParsing.open`."""

    def __init__(self, reasoning: ReasoningSession | None, calls: _Calls | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Return the parts that can be determined after ``text``.

        Raises:
            PluginFailed: the reasoning parser failed.
        """
        if self._reasoning is None:
            return self._answer((AnswerText(text),) if text else ())
        return self._answer(self._reasoning.push(text))

    def flush(self, is_cut: bool = False) -> Sequence[AnswerPart]:
        """Return the remaining parts at the end of the text; ``is_cut``: a limit ended it.

        Raises:
            PluginFailed: the reasoning parser failed.
        """
        parts = self._reasoning.flush(is_cut) if self._reasoning is not None else ()
        answer = self._answer(parts)
        return answer if self._calls is None else [*answer, *self._calls.flush(is_cut)]

    def _answer(self, parts: Sequence[ReasoningPart]) -> Sequence[AnswerPart]:
        calls = self._calls
        if calls is None:
            return parts
        answer: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, ReasoningText):
                answer.append(part)
            else:
                answer += calls.push(part.text)
        return answer


class _Calls:
    """A tool session plus the rules of core: white space, the call limit, and plain text after a failure.

    A failure inside a call fails the request: the client would take half a call for a whole one.
    """

    def __init__(self, session: ToolSession | None, max_calls: int | None) -> None:
        self._session = session
        self._max_calls = max_calls
        self._num_calls = 0
        self._is_open = False
        self._has_text = False
        self._white = ""  # dropped if a call follows
        self._held = ""  # the text that the session has not given back yet

    def push(self, text: str) -> list[AnswerPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`.

        Raises:
            PluginFailed: it failed inside a call.
        """
        if self._session is None:
            return [AnswerText(text)]
        self._held += text
        try:
            return self._kept("push", self._session, self._session.push(text))
        except PluginFailed as error:
            return self._give_up(error)

    def flush(self, is_cut: bool) -> list[AnswerPart]:
        """See :class:`enginehouse.contract.parsers.ToolSession`.

        Raises:
            PluginFailed: it failed inside a call.
        """
        if self._session is None:
            return []
        try:
            parts = self._kept("flush", self._session, self._session.flush(is_cut))
        except PluginFailed as error:
            return self._give_up(error)
        if self._white and not self._num_calls:
            parts.append(AnswerText(self._white))
        return parts

    def _give_up(self, error: PluginFailed) -> list[AnswerPart]:
        """Return what the failed session held back as text, and do not use it any more."""
        self._session = None
        if self._is_open and self._is_shown:
            raise error
        shown = self._white + self._held
        return [AnswerText(shown)] if shown else []

    @property
    def _is_shown(self) -> bool:
        """True if the last call is not beyond the limit."""
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _kept(self, place: str, session: ToolSession, parts: Sequence[ToolPart]) -> list[AnswerPart]:
        """Return the parts to be shown.

        Raises:
            PluginFailed: they form no calls.
        """
        if wrong := self._out_of_order(parts, is_last=place == "flush"):
            raise guard_of(session, "tool parser").mistake(place, wrong)
        kept: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, AnswerText):
                if part.text:
                    self._held = self._held.partition(part.text)[2]  # before it were tags
                    self._show(part.text, kept)
                continue
            self._held = ""
            if isinstance(part, CallStarted):
                self._white = ""
                self._num_calls += 1
            self._is_open = not isinstance(part, CallFinished)
            if self._is_shown:
                kept.append(part)
        return kept

    def _out_of_order(self, parts: Sequence[ToolPart], is_last: bool) -> str:
        """Return what is wrong with the order of parts; empty if it is right."""
        is_open = self._is_open
        for part in parts:
            if is_open != isinstance(part, CallArguments | CallFinished):
                return f"gave {type(part).__name__} {'inside' if is_open else 'outside'} a call"
            is_open = isinstance(part, CallStarted | CallArguments)
        return "left a call open" if is_open and is_last else ""

    def _show(self, text: str, kept: list[AnswerPart]) -> None:
        """Emit text; hold back white space at its end, and drop it at the start of text that follows only calls."""
        text = self._white + text
        shown = text.rstrip()
        self._white = text[len(shown) :]
        if shown and self._num_calls and not self._has_text:
            shown = shown.lstrip()
        if shown:
            self._has_text = True
            kept.append(AnswerText(shown))


def _open_reasoning(reasoning: ReasoningFormat, is_open: bool) -> ReasoningSession:
    return guarded(reasoning, ReasoningFormat, guard_of(reasoning, "reasoning parser")).open(is_open)


def _open_tools(tool_format: ToolFormat, tools: Sequence[Tool]) -> ToolSession | None:
    try:
        return guarded(tool_format, ToolFormat, guard_of(tool_format, "tool parser")).open(tools)
    except PluginFailed:  # the answer is text
        return None
