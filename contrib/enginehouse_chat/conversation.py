"""A conversation with one model of an OpenAI-compatible server: message history, and the next answer piece by piece.

Knows HTTP and server-sent events. Does not know the terminal. Displayed by ``enginehouse chat``.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import define, field, frozen

from enginehouse.cli.target import connection_to
from enginehouse.contract.errors import EnginehouseError

__all__ = ["AnswerPart", "ChatFailed", "Conversation"]

_TIMEOUT_S = 600.0


class ChatFailed(EnginehouseError):
    """The server refused a message or broke off its answer."""


@frozen
class AnswerPart:
    """A part of an answer. ``usage`` is the server's token count, once, at the end."""

    kind: Literal["text", "reasoning", "usage"]
    text: str = ""
    usage: dict[str, Any] = field(factory=dict)


@define
class Conversation:
    """Message history and request parameters.

    Attributes:
        url: base URL of ``/chat/completions``.
        system: the system prompt, sent first in every request.
        turns: messages of user and assistant.
        fields: further request fields, such as ``temperature``.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    system: str = ""
    turns: list[dict[str, str]] = field(factory=list)
    fields: dict[str, Any] = field(factory=dict)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages sent to the model."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def reset(self) -> None:
        """Clear the history; the system prompt and the fields stay."""
        self.turns.clear()

    def ask(self, text: str) -> Generator[AnswerPart, None, None]:
        """Send ``text`` and yield the answer as it arrives.

        An answer that is interrupted (close the iterator) stays in the conversation as far as it arrived, so that the
        model knows what the user saw. A question without any answer is removed.

        Raises:
            ChatFailed: the server refuses it, breaks off, or cannot be reached.
        """
        self.turns.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            for piece in self._stream():
                if piece.kind == "text":
                    said.append(piece.text)
                yield piece
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            else:
                self.turns.pop()

    def _stream(self) -> Iterator[AnswerPart]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        path = urlsplit(self.url).path.rstrip("/")
        try:
            with closing(connection_to(self.url, _TIMEOUT_S)) as connection:
                connection.request("POST", f"{path}/chat/completions", json.dumps(body), headers)
                with closing(connection.getresponse()) as answer:
                    yield from _parts(answer)
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"{self.url} cannot be reached: {error or type(error).__name__}") from error


def _parts(answer: http.client.HTTPResponse) -> Iterator[AnswerPart]:
    if answer.status != 200:
        raise ChatFailed(f"{answer.status}: {_error_of(answer.read(100_000))}")
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield from _of_chunk(data)
    raise ChatFailed("the server broke off its answer")


def _of_chunk(data: bytes) -> Iterator[AnswerPart]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ChatFailed(f"the server sends no JSON: {data[:80]!r}") from error
    if "error" in chunk:
        raise ChatFailed(_error_of(data))
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield AnswerPart("reasoning", reasoning)
        if text := delta.get("content"):
            yield AnswerPart("text", text)
    if usage := chunk.get("usage"):
        yield AnswerPart("usage", usage=usage)


def _error_of(body: bytes) -> str:
    """Return the message of an error response, or its beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
