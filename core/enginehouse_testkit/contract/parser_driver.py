"""Driver of parser sessions in contract tests: texts split in many ways, and the accumulated result."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from attrs import define, field

from enginehouse.contract.composition import Composition, FreeText, InOrder, Marker, Matching, OneOf, Repeated, Text
from enginehouse.contract.parsers import AnswerPart, AnswerText, CallArguments, CallFinished, CallStarted, ReasoningText
from enginehouse.contract.types import Tool

__all__ = ["TOOLS", "Said", "Session", "cuts", "said_by", "texts_of"]


class Session(Protocol):
    """A session of a tool parser or a reasoning parser."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Return the parts that can be determined after ``text``."""
        ...

    def flush(self, is_cut: bool) -> Sequence[AnswerPart]:
        """Return the remaining parts."""
        ...


@define
class Said:
    """Accumulated content of an answer; ``calls`` are pairs of name and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(factory=list)

    def add(self, parts: Sequence[AnswerPart], is_open: bool) -> bool:
        """Add parts, checking their order; return True if a call is open afterwards."""
        for part in parts:
            match part:
                case AnswerText(text):
                    assert text and not is_open, "text must not be empty, nor be inside a call"
                    self.content += text
                case ReasoningText(text):
                    assert text and not is_open and not self.calls, "reasoning must come first"
                    self.reasoning += text
                case CallStarted(name):
                    assert not is_open, "a call starts inside another one"
                    self.calls.append((name, ""))
                    is_open = True
                case CallArguments(text):
                    assert text and is_open, "arguments must not be empty, nor be outside a call"
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + text)
                case CallFinished():
                    assert is_open, "a call ends that was not open"
                    is_open = False
        return is_open


def said_by(session: Session, pieces: Sequence[str], is_cut: bool = False) -> Said:
    """Return the result of a session for a text in these pieces."""
    said, is_open = Said(), False
    for piece in pieces:
        is_open = said.add(session.push(piece), is_open)
    is_open = said.add(session.flush(is_cut), is_open)
    assert not is_open, "a call was never finished"
    return said


def cuts(text: str) -> Iterator[list[str]]:
    """Split a text in many ways: by 1, 2, 3 and 7 characters, in two at every position, and at random."""
    for size in (1, 2, 3, 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    chance = random.Random(len(text))
    for _ in range(5):
        places = sorted({0, len(text), *(chance.randrange(len(text) + 1) for _ in range(len(text) // 5))})
        yield [text[start:end] for start, end in itertools.pairwise(places)]


def _tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    definition = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return Tool(name=name, parameters=parameters, definition=definition)


TOOLS = (
    _tool("set_lamp", on={"type": "boolean"}, level={"type": "integer"}),
    _tool("say", text={"type": "string"}),
    _tool("now"),
)

_VALUES: dict[str, Any] = {"boolean": True, "integer": 3, "string": 'quotes " and }] and 🙂'}


def texts_of(composition: Composition) -> list[str]:
    """Return texts that a composition describes, one per alternative; [] if a part is not made of JSON Schemas."""
    match composition:
        case Text(text) | Marker(text):
            return [text]
        case FreeText(until):
            return [f"Let me see. {until or ''}"]
        case InOrder(parts):
            return ["".join(texts) for texts in itertools.product(*map(texts_of, parts))]
        case OneOf(parts):
            return [text for part in parts for text in texts_of(part)]
        case Repeated(part, at_least, at_most):
            counts = sorted({at_least, min(at_least + 1, at_most)})
            return [text * count for text in texts_of(part)[:1] for count in counts]
        case Matching(constraint):
            return [json.dumps(_instance(json.loads(constraint.text)))] if constraint.kind == "json_schema" else []


def _instance(schema: dict[str, Any]) -> Any:
    """Return a value for the schema of one of our tools, or of one of its properties."""
    if schema.get("type") in _VALUES:
        return _VALUES[schema["type"]]
    return {name: _instance(inner) for name, inner in schema.get("properties", {}).items()}
