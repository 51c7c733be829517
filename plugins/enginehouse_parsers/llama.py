"""Llama 3's calls: one bare JSON object, optionally after ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from enginehouse.contract.composition import compose
from enginehouse.contract.parsers import ChatFormat, PreparedChat, ToolSession
from enginehouse.contract.types import Constraint, Message, Tool
from enginehouse_parsers.calls import Answer, json_calls, or_answer, refuse_strict
from enginehouse_parsers.json_calls import JsonCallSession
from enginehouse_parsers.tagged_json import takes_tools

__all__ = ["LlamaFormat", "LlamaToolParser"]

_TAG = "<|python_tag|>"


class LlamaFormat:
    """Implements :class:`enginehouse.contract.parsers.ToolFormat`."""

    markers = (_TAG,)

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Split messages with several calls into one turn per call, because the template supports only one."""
        prepared: list[Message] = []
        results = {message.tool_call_id: message for message in messages if message.role == "tool"}
        moved: set[str] = set()
        for message in messages:
            if message.role == "tool" and message.tool_call_id in moved:
                continue
            if len(message.tool_calls) < 2:
                prepared.append(message)
                continue
            for number, call in enumerate(message.tool_calls):
                prepared.append(evolve(message, content="" if number else message.content, tool_calls=(call,)))
                if call.id in results:
                    prepared.append(results[call.id])
                    moved.add(call.id)
        return PreparedChat(tuple(prepared), tools)

    def constraint(self, tools: Sequence[Tool], parallel: bool | None, answer: Answer = None) -> Constraint:
        """Constrain to one call; this format has no parallel ones."""
        if answer == "any":
            raise refuse_strict(tools)
        return compose(or_answer(json_calls(tools, "parameters"), answer), "tool_choice")

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        return JsonCallSession(frozenset(tool.name for tool in tools), (_TAG,), bare=True)


class LlamaToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`."""

    name = "llama3"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Match Llama's turns, and a template that writes ``parameters``."""
        template = model.template
        if not takes_tools(template) or "<|start_header_id|>" not in template or "<function=" in template:
            return 0.0
        return 0.8 if _TAG in template or '"parameters": ' in template else 0.0

    def bind(self, model: ChatFormat) -> LlamaFormat:
        """See :class:`enginehouse.contract.parsers.ToolParser`."""
        return LlamaFormat()
