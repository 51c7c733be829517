"""JSON between ``<tool_call>`` tags: used by Hermes and Qwen, and requested from models without tool support."""

from __future__ import annotations

import re
from collections.abc import Sequence

from enginehouse.contract.composition import Composition, InOrder, Marker, Text, compose
from enginehouse.contract.parsers import ChatFormat, PreparedChat, ToolSession
from enginehouse.contract.types import Constraint, Message, Tool
from enginehouse_parsers.calls import (
    Answer,
    json_calls,
    one_or_more,
    only_strict,
    or_answer,
    strict_param,
    talk_or_call,
)
from enginehouse_parsers.described_tools import describe_calls_in_text
from enginehouse_parsers.json_calls import JsonCallSession

__all__ = ["DefaultToolParser", "HermesToolParser", "TaggedJsonFormat", "takes_tools"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Matches a template that explains or writes the format; other formats use the same tags.
_JSON_IN_TAGS = re.compile(r"""<tool_call>[\\n\s"'{}~+-]{0,30}\{\\?["'](?:name|arguments)""")


def takes_tools(template: str) -> bool:
    """True if a template uses the variable ``tools``."""
    return re.search(r"\btools\b", template) is not None


class TaggedJsonFormat:
    """Implements :class:`enginehouse.contract.parsers.ToolFormat`."""

    markers = (_OPEN, _CLOSE)

    def __init__(self, is_native: bool) -> None:
        self._is_native = is_native

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Return the chat unchanged for a template with tool support, otherwise with tools as text."""
        if self._is_native:
            return PreparedChat(messages, tools)
        return PreparedChat(describe_calls_in_text(messages, tools, _OPEN, _CLOSE))

    def constraint(self, tools: Sequence[Tool], parallel: bool | None, answer: Answer = None) -> Constraint:
        """See ``ToolFormat``. Models not trained to call tools would repeat calls if allowed."""
        parallel = self._is_native if parallel is None else parallel
        if answer == "any":
            talk = talk_or_call(_OPEN, _behind_tag(only_strict(tools)), "\n", parallel)
            return compose(talk, strict_param(tools))
        call = InOrder((Marker(_OPEN), _behind_tag(tools)))
        return compose(or_answer(one_or_more(call, "\n", parallel), answer), "tool_choice")

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        return JsonCallSession(frozenset(tool.name for tool in tools), (_OPEN,), _CLOSE)


def _behind_tag(tools: Sequence[Tool]) -> Composition:
    return InOrder((Text("\n"), json_calls(tools, "arguments"), Text("\n"), Marker(_CLOSE)))


class HermesToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`. The template contains the tags."""

    name = "hermes"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if a template with tools has JSON between the tags."""
        return 0.9 if takes_tools(model.template) and _JSON_IN_TAGS.search(model.template) else 0.0

    def bind(self, model: ChatFormat) -> TaggedJsonFormat:
        """See :class:`enginehouse.contract.parsers.ToolParser`."""
        return TaggedJsonFormat(is_native=True)


class DefaultToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`. For templates with no or unknown tool support."""

    name = "default"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Lowest confidence, for every model."""
        return 0.05

    def bind(self, model: ChatFormat) -> TaggedJsonFormat:
        """See :class:`enginehouse.contract.parsers.ToolParser`."""
        return TaggedJsonFormat(is_native=False)
