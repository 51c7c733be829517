"""Compositions shared by several formats: calls as JSON objects whose arguments match their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import evolve

from enginehouse.contract.composition import Composition, FreeText, InOrder, Marker, Matching, OneOf, Repeated, Text
from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import Constraint, Tool
from enginehouse_parsers.written_json import written_json

__all__ = [
    "MAX_CALLS",
    "Answer",
    "arguments_of",
    "json_calls",
    "object_schema",
    "one_or_more",
    "only_strict",
    "or_answer",
    "refuse_strict",
    "strict_param",
    "talk_or_call",
]

Answer = Constraint | Literal["any"] | None
"""Constraint of an answer without calls, see :meth:`enginehouse.contract.parsers.ToolFormat.constraint`."""

MAX_CALLS = 16
"""Maximum number of calls of one enforced answer: a small model that has started to call does not stop by itself."""

_BRANCHES = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties")


def object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments: an object, without undeclared members unless the schema asks for them."""
    schema = {"type": "object", **parameters}
    if "additionalProperties" not in schema and not any(keyword in schema for keyword in _BRANCHES):
        schema["additionalProperties"] = False
    return schema


def arguments_of(tool: Tool) -> Matching:
    """Return the arguments of a tool as a JSON object."""
    text = written_json(object_schema(tool.parameters))
    return Matching(Constraint(kind="json_schema", text=text, param=f"{tool.param}.parameters"))


def strict_param(tools: Sequence[Tool]) -> str:
    """Return the request field that requires optional calls to be validated."""
    return next(f"{tool.param}.strict" for tool in tools if tool.strict)


def only_strict(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools; those that are not strict accept any object as arguments."""
    return [tool if tool.strict else evolve(tool, parameters={"additionalProperties": True}) for tool in tools]


def refuse_strict(tools: Sequence[Tool]) -> UnsupportedParameter:
    """Return the error for formats in which the beginning of a call looks like text."""
    param = strict_param(tools)
    message = f"{param}: this model's calls can only be checked with the tool_choice 'required' or a named function"
    return UnsupportedParameter(message, param)


def json_calls(tools: Sequence[Tool], arguments_key: str) -> Composition:
    """Composition of one call of any of the tools, as a JSON object."""
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
    """Split into one part per JSON token: a greedy decoder could not distinguish longer ones from another object."""
    return tuple(map(Text, tokens))


def one_or_more(call: Composition, separator: str, parallel: bool | None) -> Composition:
    """Composition of a call, and further ones unless ``parallel`` is false."""
    if parallel is False:
        return call
    another = InOrder((Text(separator), call)) if separator else call
    return InOrder((call, Repeated(another, 0, MAX_CALLS - 1)))


def or_answer(calls: Composition, answer: Constraint | None) -> Composition:
    """Composition of calls, or an answer without any."""
    return calls if answer is None else OneOf((calls, Matching(answer)))


def talk_or_call(marker: str, behind_marker: Composition, separator: str, parallel: bool | None) -> Composition:
    """Composition of any text, with calls in the form of ``behind_marker`` after each marker."""
    further: tuple[Composition, ...] = ()
    if parallel is not False:
        another = InOrder((*((Text(separator),) if separator else ()), Marker(marker), behind_marker))
        further = (Repeated(another, 0, MAX_CALLS - 1),)
    return OneOf((FreeText(), InOrder((FreeText(until=marker), behind_marker, *further))))
