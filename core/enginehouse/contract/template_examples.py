"""Example chats that core renders with a model's chat template, so that parsers can see what the template writes.

A template tells how its model marks calls and reasoning: it writes them for earlier turns. Core renders
:data:`EXAMPLES` when a model is loaded and hands the texts to parsers in
:class:`enginehouse.contract.parsers.ChatFormat`. All names and values are texts that no template writes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from enginehouse.contract.types import Message, Tool, ToolCall

__all__ = [
    "ANSWER",
    "CALL_IDS",
    "EXAMPLES",
    "EXAMPLE_TOOLS",
    "QUESTION",
    "REASONING",
    "RESULTS",
    "Example",
]

QUESTION = "wozu_question"
"""Content of the user's message."""

ANSWER = "wozu_answer"
"""Content of the assistant's message in ``answer`` and ``reasoning``."""

REASONING = "wozu_reasoning"
"""Reasoning in ``reasoning`` and ``reasoned call``."""

RESULTS = ("wozu_result_one", "wozu_result_two")
"""Contents of the results of calls."""

CALL_IDS = ("wozuid001", "wozuid002")
"""Ids of calls: nine letters and digits, as Mistral's templates require."""


@frozen(kw_only=True)
class Example:
    """A chat to be rendered.

    Attributes:
        messages: the chat.
        tools: value of the template's ``tools``.
        variables: further variables of the template.
        opens: end with the beginning of an assistant's turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(factory=dict)
    opens: bool = False


def _tool(name: str, properties: dict[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "wozu_description", "parameters": parameters}
    return Tool(name=name, parameters=parameters, definition={"type": "function", "function": function})


def _typed(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": "wozu_property", **more}


EXAMPLE_TOOLS = (
    _tool(
        "wozu_alpha",
        {
            "key_a": _typed("string"),
            "key_b": _typed("integer"),
            "key_c": _typed("boolean"),
            "key_d": _typed("array", items={"type": "string"}),
            "key_e": _typed("object", additionalProperties=_typed("string")),
            "key_f": _typed("string"),
        },
    ),
    _tool("wozu_beta", {"key_g": _typed("string")}),
    _tool("wozu_gamma", {}),
)
"""The functions that the examples call."""

_VALUES = {
    "key_a": "wert_a",
    "key_b": 31415,
    "key_c": True,
    "key_d": ["wert_d", "wert_dd"],
    "key_e": {"inner": "wert_e"},
    "key_f": "wert_f",
}
_USER = Message(role="user", content=QUESTION)
_SYSTEM = Message(role="system", content="wozu_system")
_ANSWERED = Message(role="assistant", content=ANSWER)
_NEXT = Message(role="user", content="wozu_next")
_THINKS = {"enable_thinking": True, "thinking": True}
_THINKS_NOT = {"enable_thinking": False, "thinking": False}


def _call(number: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=CALL_IDS[number], name=name, arguments=json.dumps(arguments))


_ONE = _call(0, "wozu_alpha", key_a="wert_a")
_TWO = _call(1, "wozu_beta", key_g="wert_g")
_ALL = _call(0, "wozu_alpha", **_VALUES)
_NONE = _call(0, "wozu_gamma")


def _result(number: int, name: str) -> Message:
    return Message(role="tool", content=RESULTS[number], name=name, tool_call_id=CALL_IDS[number])


def _turn(*calls: ToolCall, content: str = "", reasoning: str | None = None) -> Example:
    """Return a chat with an assistant's turn of calls, and their results."""
    results = tuple(_result(number, call.name) for number, call in enumerate(calls))
    assistant = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Example(messages=(_USER, assistant, *results), tools=EXAMPLE_TOOLS)


EXAMPLES: Mapping[str, Example] = {
    "open": Example(messages=(_USER,), opens=True),
    "open with tools": Example(messages=(_USER,), tools=EXAMPLE_TOOLS, opens=True),
    "system and tools": Example(messages=(_SYSTEM, _USER), tools=EXAMPLE_TOOLS, opens=True),
    "open, reasoning on": Example(messages=(_USER,), opens=True, variables=_THINKS),
    "open, reasoning off": Example(messages=(_USER,), opens=True, variables=_THINKS_NOT),
    "answer": Example(messages=(_USER, _ANSWERED, _NEXT), tools=EXAMPLE_TOOLS),
    "call": _turn(_ONE),
    "two calls": _turn(_ONE, _TWO),
    "values": _turn(_ALL),
    "no arguments": _turn(_NONE),
    "answer and call": _turn(_ONE, content=ANSWER),
    "question after a result": evolve(_turn(_ONE), messages=(*_turn(_ONE).messages, _NEXT)),
    "reasoning": Example(messages=(_USER, Message(role="assistant", content=ANSWER, reasoning=REASONING))),
    "reasoned call": _turn(_ONE, reasoning=REASONING),
}
"""The chats by name; a name is a key of ``ChatFormat.examples`` if the template could render its chat."""
