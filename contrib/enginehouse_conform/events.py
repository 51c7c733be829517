"""Reads streams of named events and of JSON lines, strictly, and the arguments of forced calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from enginehouse.cli.target import Answer
from enginehouse_conform.check import CheckFailed, require

__all__ = ["LAMP_SCHEMA", "fits_lamp", "read_lines", "read_named"]

_DONE = "[DONE]"
LAMP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer", "enum": [0, 5, 10]}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
"""Parameters of the function ``set_lamp``."""


def read_named(answer: Answer, *, ends_with_done: bool) -> list[dict[str, Any]]:
    """Return the events of a stream whose ``event:`` line is the type of the data; pings are left out.

    Args:
        ends_with_done: the last line of data is ``[DONE]``.
    """
    require(answer.status == 200, f"the stream was answered with {answer.shown()}")
    kind = answer.headers.get("content-type", "")
    require(kind.startswith("text/event-stream"), f"the stream has the content type {kind!r}")
    text = answer.body.decode("utf-8").replace("\r\n", "\n")
    require(text.endswith("\n\n"), "the stream does not end with a blank line")
    blocks = [
        block for block in text.split("\n\n") if any(not line.startswith(":") for line in block.split("\n") if line)
    ]
    if ends_with_done:
        last = [line for line in blocks[-1].split("\n") if not line.startswith(":")] if blocks else []
        require(last == [f"data: {_DONE}"], f"the stream does not end with {_DONE}")
        blocks.pop()
    events = [_named(block) for block in blocks]
    return [event for event in events if event["type"] != "ping"]


def _named(block: str) -> dict[str, Any]:
    lines = [line for line in block.split("\n") if not line.startswith(":")]
    fields = [line.partition(":")[::2] for line in lines]
    names = [value.strip() for name, value in fields if name == "event"]
    data = [value.strip() for name, value in fields if name == "data"]
    require(len(names) == 1 and len(data) == 1, f"an event has not one event line and one data line: {block[:80]!r}")
    event = _object(data[0])
    require(event.get("type") == names[0], f"the event {names[0]!r} has the type {event.get('type')!r}")
    require(event["type"] != "error", f"the stream holds an error: {data[0][:160]}")
    return event


def read_lines(answer: Answer) -> list[dict[str, Any]]:
    """Return the objects of a stream of JSON lines."""
    require(answer.status == 200, f"the stream was answered with {answer.shown()}")
    kind = answer.headers.get("content-type", "")
    require(kind.startswith("application/x-ndjson"), f"the stream has the content type {kind!r}")
    require(answer.body.endswith(b"\n"), "the stream does not end with a line break")
    return [_object(line) for line in answer.body.decode("utf-8").split("\n") if line]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckFailed(f"an event is not valid JSON: {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise CheckFailed(f"an event is not a JSON object: {text[:80]!r}")
    return found


def fits_lamp(arguments: Any) -> None:
    """Require arguments, a string of JSON or an object, that fit :data:`LAMP_SCHEMA`."""
    shown = arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise CheckFailed(f"arguments are not valid JSON: {shown!r}") from error
    fits = (
        isinstance(arguments, Mapping)
        and set(arguments) == {"on", "level"}
        and isinstance(arguments["on"], bool)
        and arguments["level"] in (0, 5, 10)
    )
    require(fits, f"arguments do not fit their schema: {shown!r}")
