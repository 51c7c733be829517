"""Calls as a Python list, as written by Llama 4 and LFM2."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.contract.composition import Composition, InOrder, Matching, OneOf, Repeated, Text, compose
from enginehouse.contract.parsers import ChatFormat, PreparedChat, ToolSession
from enginehouse.contract.types import Constraint, Message, Tool
from enginehouse_parsers.calls import Answer, arguments_of, object_schema, one_or_more, or_answer, refuse_strict
from enginehouse_parsers.pythonic_calls import PythonicCallSession
from enginehouse_parsers.tagged_json import takes_tools

__all__ = ["PythonicFormat", "PythonicToolParser"]

_OPENING = ("<|python_start|>", "<|tool_call_start|>")
_CLOSING = ("<|python_end|>", "<|tool_call_end|>")
_MEMBERS = ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions")
"""Keywords of a schema whose members can be written one by one."""


class PythonicFormat:
    """Implements :class:`enginehouse.contract.parsers.ToolFormat`."""

    markers = (*_OPENING, *_CLOSING)

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Return the chat unchanged: these templates support tools."""
        return PreparedChat(messages, tools)

    def constraint(self, tools: Sequence[Tool], parallel: bool | None, answer: Answer = None) -> Constraint:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        if answer == "any":
            raise refuse_strict(tools)
        calls: list[Composition] = [_call(tool) for tool in tools]
        call = calls[0] if len(calls) == 1 else OneOf(tuple(calls))
        listed = InOrder((Text("["), one_or_more(call, ", ", parallel), Text("]")))
        return compose(or_answer(listed, answer), "tool_choice")

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """See :class:`enginehouse.contract.parsers.ToolFormat`."""
        return PythonicCallSession(frozenset(tool.name for tool in tools), _OPENING, _CLOSING)


class PythonicToolParser:
    """Implements :class:`enginehouse.contract.parsers.ToolParser`."""

    name = "pythonic"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template explains the format, or contains its tags."""
        template = model.template
        known = "func_name1(" in template or any(tag in template for tag in _OPENING)
        return 0.85 if takes_tools(template) and known else 0.0

    def bind(self, model: ChatFormat) -> PythonicFormat:
        """See :class:`enginehouse.contract.parsers.ToolParser`."""
        return PythonicFormat()


def _call(tool: Tool) -> Composition:
    schema = object_schema(tool.parameters)
    members = _members(schema)
    if members is None:
        return InOrder((Text(f"{tool.name}(**"), arguments_of(tool), Text(")")))
    required = set(schema.get("required", ()))
    values = {name: _value(member, schema, f"{tool.param}.parameters.properties.{name}") for name, member in members}
    first = [name for name, _ in members if name in required]
    optional = [name for name, _ in members if name not in required]
    return InOrder((Text(f"{tool.name}("), *_arguments(values, first, optional), Text(")")))


def _members(schema: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """Return the members in order; None for a schema with other keywords, or names that are not Python identifiers."""
    properties = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or not set(schema) <= set(_MEMBERS):
        return None
    if not isinstance(properties, dict) or not set(schema.get("required", ())) <= properties.keys():
        return None
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in properties):
        return None
    return list(properties.items())


def _value(schema: Any, root: Mapping[str, Any], param: str) -> Matching:
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    text = json.dumps({**definitions, **schema} if isinstance(schema, dict) else schema)
    return Matching(Constraint(kind="json_schema", text=text, param=param))


def _arguments(values: Mapping[str, Matching], required: list[str], optional: list[str]) -> list[Composition]:
    """Return the required arguments, then any of the optional ones, separated by commas."""
    if required:
        parts: list[Composition] = []
        for number, name in enumerate(required):
            parts += Text(f"{', ' if number else ''}{name}="), values[name]
        return [*parts, *(_further(values, name) for name in optional)]
    if not optional:
        return []
    beginnings: list[Composition] = [
        InOrder((Text(f"{name}="), values[name], *(_further(values, other) for other in optional[number + 1 :])))
        for number, name in enumerate(optional)
    ]
    return [Repeated(OneOf(tuple(beginnings)), 0, 1)]


def _further(values: Mapping[str, Matching], name: str) -> Composition:
    return Repeated(InOrder((Text(f", {name}="), values[name])), 0, 1)
