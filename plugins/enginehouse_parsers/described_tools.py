"""Renders tools, calls and results as plain text, for templates that do not show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from enginehouse.contract.types import Message, Tool
from enginehouse_parsers.json_schemas import type_of
from enginehouse_parsers.syntax import ID, INDEX, KEY, NAME, TYPE, ToolSyntax, distinctive
from enginehouse_parsers.written_json import written_json

__all__ = ["INSTRUCTING", "describe_calls_in_text", "written_calls"]

INSTRUCTING = ("system", "developer")
"""Roles of messages that instruct the model, at the beginning of a chat."""


def describe_calls_in_text(
    messages: Sequence[Message], tools: Sequence[Tool], syntax: ToolSyntax, *, calls: bool, results: bool
) -> tuple[Message, ...]:
    """Return the chat with tools in the first system message, and calls and results in the texts.

    Results are merged into the user message that follows them, because many templates require alternating roles.

    Args:
        tools: those to describe.
        syntax: how calls are written.
        calls: write calls as text.
        results: write results as text.
    """
    described = [_with_calls(message, syntax) for message in messages] if calls else list(messages)
    described = _with_results(described) if results else described
    if not tools:
        return tuple(described)
    text = _describe(tools, syntax)
    if described and described[0].role in INSTRUCTING:
        first = described[0]
        text = f"{first.content}\n\n{text}" if first.content else text
        return (evolve(first, content=text), *described[1:])
    return (Message(role="system", content=text), *described)


def _describe(tools: Sequence[Tool], syntax: ToolSyntax) -> str:
    listed = "\n".join(written_json(tool.definition) for tool in tools)
    how = "To call a function, write its name and its arguments as a JSON object between these tags"
    if syntax.kind == "tagged":
        how = "To call a function, write its name and each of its arguments between these tags"
    elif syntax.kind == "keywords":
        how = "To call a function, write its name and its arguments as in Python"
    return (
        "You can call functions. These are available, one JSON object per line:\n"
        f"{listed}\n\n{how}:\n{written_calls((_EXAMPLE,), syntax)}"
    )


_EXAMPLE = ("<function name>", "{...}")


def written_calls(calls: Sequence[tuple[str, str]], syntax: ToolSyntax) -> str:
    """Return calls, given as names and arguments in JSON, as the model would write them."""
    written = [
        f"{_filled(syntax.call_start, number).replace(NAME, name)}{name}{_filled(syntax.name_end, number)}"
        f"{_written_arguments(arguments, syntax)}{syntax.call_end}"
        for number, (name, arguments) in enumerate(calls)
    ]
    start, end = syntax.section_start, syntax.section_end
    if (
        syntax.openers and syntax.closers and not distinctive((start + syntax.call_start).strip())
    ):  # the template does not write them
        start, end = f"{syntax.openers[-1]}{start}", f"{end}{syntax.closers[-1]}"
    return f"{start}{syntax.separator.join(written)}{end}"


def _filled(text: str, number: int) -> str:
    return text.replace(ID, f"call{number:05}").replace(INDEX, str(number))


def _written_arguments(arguments: str, syntax: ToolSyntax) -> str:
    members = _members_of(arguments)
    if syntax.kind == "keywords":
        if members is None:
            return f"(**{arguments or '{}'})"
        return f"({', '.join(f'{key}={written_json(value)}' for key, value in members.items())})"
    if syntax.kind != "tagged" or members is None:
        return arguments or "{}"
    written = ""
    for key, value in members.items():
        words, kind = dict(syntax.type_words), type_of(value)
        key_end = syntax.key_end.replace(TYPE, words.get(kind, words.get("", "")))
        text = value if isinstance(value, str) else written_json(value)
        written += f"{syntax.parameter_start}{key}{key_end}{text}{syntax.value_end.replace(KEY, key)}"
    return written


def _members_of(arguments: str) -> dict[str, Any] | None:
    """Return the arguments; None if they are not an object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _with_calls(message: Message, syntax: ToolSyntax) -> Message:
    if not message.tool_calls:
        return message
    calls = written_calls([(call.name, call.arguments or "{}") for call in message.tool_calls], syntax)
    return evolve(message, content=f"{message.content}\n{calls}" if message.content else calls, tool_calls=())


def _with_results(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message.role == "tool":
            waiting.append(message)
            continue
        if waiting and message.role == "user":
            merged.append(_after_results(waiting, message))
        elif waiting:
            merged += _after_results(waiting, Message(role="user", content="")), message
        else:
            merged.append(message)
        waiting = []
    if waiting:
        merged.append(_after_results(waiting, Message(role="user", content="")))
    return merged


_RESULT_START, _RESULT_END = "<tool_response>\n", "\n</tool_response>"


def _after_results(results: Sequence[Message], message: Message) -> Message:
    """Return a message of a user with the results before its content, images of both included."""
    texts = [f"{_RESULT_START}{result.content}{_RESULT_END}" for result in results]
    content = "\n".join((*texts, message.content) if message.content or message.parts else texts)
    if not any(one.parts for one in (*results, message)):
        return evolve(message, content=content)
    parts = [part for one in results for part in (_RESULT_START, *(one.parts or (one.content,)), _RESULT_END)]
    return evolve(message, content=content, parts=(*parts, *(message.parts or (message.content,))))
