"""A surface of one address: ``POST /say {"text": "Hello", "stream": true}`` is answered with one JSON object per line.

Keys, limits, queues, cancellation, metrics, the log and the OpenAPI document come from core.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import ge, min_len

import enginehouse
from enginehouse.contract.calls import Call
from enginehouse.contract.surface import NDJSON, Answer, Chunk, ErrorAnswer, GenerationRoute, Piece, Reply, new_id
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.contract.usage import Usage


@frozen(kw_only=True)
class SayBody:
    """The request body."""

    text: str = field(validator=min_len(1))
    model: str | None = None
    max_tokens: int = field(default=64, validator=ge(1))
    stream: bool = False


class SayAssembler:
    """Writes one response."""

    def __init__(self, answer: Answer) -> None:
        self._model = answer.model
        self._said: list[str] = []

    def opening(self) -> tuple[Chunk, ...]:
        return ({"model": self._model},)

    def push(self, piece: Piece) -> tuple[Chunk, ...]:
        self._said.append(piece.text)
        return ({"say": piece.text},) if piece.text else ()

    def close(self, usage: Usage, details: dict[str, Any] | None) -> tuple[Chunk, ...]:
        return ({"done": True, "tokens": usage.completion_tokens},)

    def fail(self, error: ErrorAnswer) -> tuple[Chunk, ...]:
        return ({"done": False, "problem": error.message},)

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        return {"model": self._model, "say": "".join(self._said), "tokens": usage.completion_tokens}


def requests(call: Call) -> list[GenerateRequest]:
    body, messages = call.body, (Message(role="user", content=call.body.text),)
    limit = {"max_tokens": body.max_tokens}
    return [GenerateRequest(request_id=new_id("say-"), model=body.model, messages=messages, stopping=limit)]


async def assemble(call: Call, answer: Answer) -> SayAssembler:
    return SayAssembler(answer)


class SaySurface:
    name = "say"
    api_version = 1
    request_id_header, takes_any_type = None, False
    routes = (
        GenerationRoute(
            path="/say", name="say", summary="Speak", body=SayBody, requests=requests, assemble=assemble, frame=NDJSON
        ),
    )

    def error(self, error: ErrorAnswer) -> Reply:
        return Reply({"problem": error.message, "code": error.code})


@enginehouse.hookimpl
def register_surfaces(register: Any) -> None:
    register(SaySurface())
