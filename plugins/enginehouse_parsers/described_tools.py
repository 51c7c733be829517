"""Renders tools, calls and results as plain text, for templates without tool support."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import evolve

from enginehouse.contract.types import Message, Tool
from enginehouse_parsers.written_json import written_json

__all__ = ["describe_calls_in_text"]

_INSTRUCTING = ("system", "developer")


def describe_calls_in_text(
    messages: Sequence[Message], tools: Sequence[Tool], opening: str, closing: str
) -> tuple[Message, ...]:
    """Return the chat without tool messages: tools are in the first system message, calls and results in the texts.

    Results are merged into the user message that follows them, because many templates require alternating roles.
    """
    described = _with_results([_with_calls(message, opening, closing) for message in messages])
    if not tools:
        return tuple(described)
    text = _describe(tools, opening, closing)
    if described and described[0].role in _INSTRUCTING:
        first = described[0]
        text = f"{first.content}\n\n{text}" if first.content else text
        return (evolve(first, content=text), *described[1:])
    return (Message(role="system", content=text), *described)


def _describe(tools: Sequence[Tool], opening: str, closing: str) -> str:
    listed = "\n".join(written_json(tool.definition) for tool in tools)
    return (
        "You can call functions. These are available, one JSON object per line:\n"
        f"{listed}\n\n"
        "To call a function, write its name and its arguments as a JSON object between these tags:\n"
        f'{opening}\n{{"name": "<function name>", "arguments": {{...}}}}\n{closing}'
    )


def _with_calls(message: Message, opening: str, closing: str) -> Message:
    if not message.tool_calls:
        return message
    calls = [
        f'{opening}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n{closing}'
        for call in message.tool_calls
    ]
    content = "\n".join([message.content, *calls] if message.content else calls)
    return evolve(message, content=content, tool_calls=())


def _with_results(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            waiting.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if waiting and message.role == "user":
            merged.append(evolve(message, content="\n".join((*waiting, message.content))))
        elif waiting:
            merged += Message(role="user", content="\n".join(waiting)), message
        else:
            merged.append(message)
        waiting = []
    if waiting:
        merged.append(Message(role="user", content="\n".join(waiting)))
    return merged
