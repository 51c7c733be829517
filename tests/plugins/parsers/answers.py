"""Answers of the tests: which tools there are, what an answer says in the end, and ways to cut a text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from enginehouse.contract.parsers import AnswerText, CallArguments, CallFinished, CallStarted, ChatFormat, ReasoningText
from enginehouse.contract.types import Tool
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_parsers.tool_format import tool_parsers

__all__ = ["DRAWN", "FORMATS", "LAMP", "NOW", "PARSERS", "SAY", "TOOLS", "cuts", "make_tool", "told"]


def make_tool(name: str, **properties: Any) -> Tool:
    """A tool whose properties are all required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    definition = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return Tool(name=name, parameters=parameters, definition=definition)


LAMP = make_tool("set_lamp", on={"type": "boolean"}, level={"type": "integer", "minimum": 0, "maximum": 10})
SAY = make_tool("say", text={"type": "string"})
NOW = make_tool("now")
TOOLS = (LAMP, SAY, NOW)


def told(parsing: AnswerParsing, pieces: Sequence[str]) -> dict[str, Any]:
    """What an answer says in the end: its content, its reasoning, and (name, arguments) of its calls."""
    parser = parsing.open()
    assert parser is not None
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    is_open = False
    for part in [part for piece in pieces for part in parser.push(piece)] + list(parser.flush()):
        match part:
            case AnswerText(text):
                assert text and not is_open
                said["content"] += text
            case ReasoningText(text):
                assert text and not is_open and not said["calls"]
                said["reasoning"] += text
            case CallStarted(name):
                assert not is_open
                is_open = True
                said["calls"].append((name, ""))
            case CallArguments(text):
                assert text and is_open
                name, arguments = said["calls"][-1]
                said["calls"][-1] = (name, arguments + text)
            case CallFinished():
                assert is_open
                is_open = False
    assert not is_open, "a call was never finished"
    return said


def cuts(text: str) -> Iterator[list[str]]:
    """The same text in many ways: whole, by 1, 2, 3, 4 and 7 characters, in two at every place, and at random."""
    yield [text]
    for size in (1, 2, 3, 4, 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    chance = random.Random(len(text))
    for _ in range(10):
        places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(len(text) // 5))})
        yield [text[start:end] for start, end in itertools.pairwise(places)]


PARSERS = {parser.name: parser for parser in tool_parsers()}
DRAWN = (
    "hermes",
    "default",
    "llama3",
    "mistral",
    "mistral-named",
    "pythonic",
    "qwen3-coder",
    "glm",
    "gemma",
    "kimi-k3",
)
"""Formats of every kind, for tests that take long."""
FORMATS = {name: parser.bind(ChatFormat("")) for name, parser in PARSERS.items()}
