"""Parses answers and reports deviations from the API."""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from enginehouse.cli.target import Answer, Target
from enginehouse_conform.check import CheckFailed, NotOffered, require

__all__ = ["Stream", "answered", "content_of", "forced", "forced_text", "offered", "read_stream", "refused"]


@frozen
class Stream:
    """The events of a streamed answer, without ``[DONE]``."""

    answer: Answer
    events: list[dict[str, Any]]

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        """Return the entries of all events for one choice, or for all."""
        found = [choice for event in self.events for choice in event.get("choices") or ()]
        return found if index is None else [choice for choice in found if choice.get("index") == index]

    def text(self, index: int = 0) -> str:
        """Return all text of one choice."""
        return "".join(
            (choice.get("delta") or {}).get("content") or choice.get("text") or "" for choice in self.choices(index)
        )

    def reasons(self, index: int = 0) -> list[str]:
        """Return all finish reasons of one choice."""
        return [choice["finish_reason"] for choice in self.choices(index) if choice.get("finish_reason")]

    def usages(self) -> list[dict[str, Any]]:
        """Return all objects with token counts."""
        return [event["usage"] for event in self.events if event.get("usage")]


def answered(answer: Answer, what: str = "the request") -> dict[str, Any]:
    """Return the JSON of an answer that must have status 200."""
    require(answer.status == 200, f"{what} was answered with {answer.shown()}")
    data = answer.json()
    if not isinstance(data, dict):
        raise CheckFailed(f"{what} was answered with no JSON object: {answer.shown()}")
    return data


def offered(answer: Answer, what: str) -> dict[str, Any]:
    """Same as :func:`answered`; a declared refusal ends the check as ``refused``."""
    if answer.status in (400, 404, 405, 422, 501):
        raise NotOffered(f"{what} is refused: {answer.shown()}", "refused")
    return answered(answer, what)


def refused(answer: Answer, what: str, param: str | None = None) -> None:
    """Require a client error in OpenAI's form; if ``param`` is given it must name that field."""
    require(answer.status in (400, 415, 422), f"{what} was answered with {answer.shown()}")
    data = answer.json()
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        raise CheckFailed(f"{what} was refused without an error object: {answer.shown()}")
    missing = {"message", "type", "param", "code"} - set(error)
    require(not missing, f"{what}: the error object lacks {', '.join(sorted(missing))}")
    require(isinstance(error["message"], str) and error["message"], f"{what}: the error has no message")
    if param is not None:
        named = str(error["param"])
        require(named.startswith(param), f"{what}: the error names {error['param']!r} instead of {param!r}")


def content_of(data: dict[str, Any], index: int = 0) -> str:
    """Return the text of one choice of a non-streamed answer."""
    choice = data["choices"][index]
    return str((choice.get("message") or {}).get("content") or choice.get("text") or "")


def read_stream(answer: Answer, what: str = "the stream") -> Stream:
    """Parse a streamed answer strictly."""
    require(answer.status == 200, f"{what} was answered with {answer.shown()}")
    kind = answer.headers.get("content-type", "")
    require(kind.startswith("text/event-stream"), f"{what} has the content type {kind!r}")
    try:
        text = answer.body.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise CheckFailed(f"{what} is not valid UTF-8: {error}") from error
    require(text.endswith("\n\n"), f"{what} does not end with a blank line")
    events: list[str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        require(
            len(lines) == 1 and lines[0].startswith("data:"),
            f"{what} has an event that is not a data line: {block[:80]!r}",
        )
        events.append(lines[0].removeprefix("data:").strip())
    require(events and events[-1] == "[DONE]" and events.count("[DONE]") == 1, f"{what} does not end with one [DONE]")
    return Stream(answer, [_event(event, what) for event in events[:-1]])


def forced(text: str) -> dict[str, Any]:
    """Return request fields that force an answer to be ``text`` as a JSON string, with any model."""
    schema = {"name": "t", "strict": True, "schema": {"type": "string", "const": text}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 200}


def forced_text(target: Target, text: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to a request that forces ``text``; ends the check if the server does not support that."""
    return offered(target.chat(**{**forced(text), **fields}), "a JSON schema with a constant")


def _event(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckFailed(f"{what} has an event that is not valid JSON: {text[:80]!r}") from error
    if not isinstance(data, dict):
        raise CheckFailed(f"{what} has an event that is not a JSON object: {text[:80]!r}")
    if "error" in data:
        raise CheckFailed(f"{what} holds an error: {text[:160]}")
    return data
