"""Compositions that several formats share: calls as JSON objects whose arguments match their schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from enginehouse.composition import Composition, InOrder, Matching, OneOf, Repeated, Text
from enginehouse.types import Constraint, Tool

__all__ = ["MAX_CALLS", "arguments_of", "json_calls", "object_schema", "one_or_more", "or_answer"]

MAX_CALLS = 16
"""Most calls of one enforced answer: a small model that has begun to call does not stop by itself."""

_BRANCHES = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties")


def object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object, without members that nobody declared unless the schema asks for them."""
    schema = {"type": "object", **parameters}
    if "additionalProperties" not in schema and not any(keyword in schema for keyword in _BRANCHES):
        schema["additionalProperties"] = False
    return schema


def arguments_of(tool: Tool) -> Matching:
    """The arguments of a tool as a JSON object."""
    text = json.dumps(object_schema(tool.parameters))
    return Matching(Constraint(kind="json_schema", text=text, param=f"{tool.param}.parameters"))


def json_calls(tools: Sequence[Tool], arguments_key: str) -> Composition:
    """One call of any of the tools, as a JSON object."""
    calls: list[Composition] = [
        InOrder(
            (
                *_texts("{", '"name"', ": ", f'"{tool.name}"', ", ", f'"{arguments_key}"', ": "),
                arguments_of(tool),
                Text("}"),
            )
        )
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else OneOf(tuple(calls))


def _texts(*tokens: str) -> tuple[Text, ...]:
    """A part for each token of JSON: a decoder that reads greedily could not tell longer ones from another object."""
    return tuple(map(Text, tokens))


def one_or_more(call: Composition, separator: str, parallel: bool) -> Composition:
    """A call, and further ones where ``parallel`` allows them."""
    if not parallel:
        return call
    another = InOrder((Text(separator), call)) if separator else call
    return InOrder((call, Repeated(another, 0, MAX_CALLS - 1)))


def or_answer(calls: Composition, answer: Constraint | None) -> Composition:
    """Calls, or an answer without any."""
    return calls if answer is None else OneOf((calls, Matching(answer)))
