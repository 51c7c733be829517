"""Mistral's calls after ``[TOOL_CALLS]``: a JSON list, or names with ``[ARGS]``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from attrs import evolve

from enginehouse.contract.composition import Composition, InOrder, Marker, OneOf, Text, compose
from enginehouse.contract.parsers import ChatFormat, PreparedChat, ToolSession
from enginehouse.contract.types import Constraint, Message, Tool
from enginehouse_parsers.calls import (
    Answer,
    arguments_of,
    json_calls,
    one_or_more,
    only_strict,
    or_answer,
    strict_param,
    talk_or_call,
)
from enginehouse_parsers.named_calls import NamedCallSession
from enginehouse_parsers.tagged_json import takes_tools

__all__ = ["MistralFormat", "MistralToolParser"]

_TAG, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)


class MistralFormat:
    """Implements :class:`enginehouse.contract.parsers.ToolFormat`.

    Args:
        names_calls: calls are a name, ``[ARGS]`` and an object.
        beginning: start of the JSON list after the tag.
    """

    markers = (_TAG, _ARGS, "[CALL_ID]")

    def __init__(self, names_calls: bool, beginning: str) -> None:
        self._names_calls = names_calls
        self._beginning = beginning

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Adapt the chat to these templates: ids of nine letters and digits, an answer between result and question."""
        prepared: list[Message] = []
        for message in messages:
            if prepared and prepared[-1].role == "tool" and message.role == "user":
                prepared.append(Message(role="assistant", content="OK."))
            calls = tuple(evolve(call, id=_short(call.id)) for call in message.tool_calls)
            call_id = _short(message.tool_call_id or "") if message.role == "tool" else None
            prepared.append(evolve(message, tool_calls=calls, tool_call_id=call_id))
        return PreparedChat(tuple(prepared), tools)

    def constraint(self, tools: Sequence[Tool], parallel: bool | None, answer: Answer = None) -> Constraint:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        repeats_tag = parallel is not False and self._names_calls
        if answer == "any":
            after_tag = self._after_tag(only_strict(tools), parallel)
            return compose(talk_or_call(_TAG, after_tag, "", repeats_tag), strict_param(tools))
        call = InOrder((Marker(_TAG), self._after_tag(tools, parallel)))
        return compose(or_answer(one_or_more(call, "", repeats_tag), answer), "tool_choice")

    def _after_tag(self, tools: Sequence[Tool], parallel: bool | None) -> Composition:
        if not self._names_calls:
            listed = one_or_more(json_calls(tools, "arguments"), ", ", parallel)
            return InOrder((Text(self._beginning), listed, Text("]")))
        named: list[Composition] = [InOrder((Text(tool.name), Marker(_ARGS), arguments_of(tool))) for tool in tools]
        return named[0] if len(named) == 1 else OneOf(tuple(named))

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        return NamedCallSession(frozenset(tool.name for tool in tools), _TAG)


class MistralToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`."""

    name = "mistral"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template contains the tag."""
        return 0.9 if takes_tools(model.template) and _TAG in model.template else 0.0

    def bind(self, model: ChatFormat) -> MistralFormat:
        """See :class:`enginehouse.contract.parsers.ToolParser`."""
        return MistralFormat(_ARGS in model.template, " [" if f"{_TAG} [" in model.template else "[")


def _short(call_id: str) -> str:
    """Return a deterministic id of nine characters."""
    if _OWN_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
