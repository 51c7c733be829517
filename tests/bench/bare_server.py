"""Litestar on uvicorn writing the same bytes again and again: what the HTTP layer could reach if it did no work.

``uvicorn bench.bare_server:at_once`` writes each stream as fast as it can, so that many events share a system
call; ``uvicorn bench.bare_server:in_turns`` lets the other streams run after every event, as an engine does that
makes one token for each of them per step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, get, post
from litestar.response import Stream

__all__ = ["at_once", "in_turns"]

# As long as an event of a chat answer.
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"script","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


async def _events(num_events: int, turns: bool) -> AsyncIterator[bytes]:
    for _ in range(num_events):
        yield _EVENT
        if turns:
            await asyncio.sleep(0)
    yield b"data: [DONE]\n\n"


@get("/health")
async def _health() -> str:
    return "ready"


def _app(turns: bool) -> Litestar:
    @post("/v1/chat/completions", status_code=200)
    async def complete(data: dict[str, Any]) -> Stream:
        return Stream(_events(data["max_tokens"], turns), media_type="text/event-stream")

    return Litestar([complete, _health], openapi_config=None)


at_once = _app(turns=False)
in_turns = _app(turns=True)
