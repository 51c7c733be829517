"""Litestar on uvicorn writing the same bytes again and again: what the HTTP layer could reach if it did no work.

``uvicorn bench.bare_server:app``; answers any POST to the chat URL with ``max_tokens`` events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, get, post
from litestar.response import Stream

__all__ = ["app"]

# As long as an event of a chat answer.
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"script","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


async def _events(num_events: int) -> AsyncIterator[bytes]:
    for _ in range(num_events):
        yield _EVENT
    yield b"data: [DONE]\n\n"


@post("/v1/chat/completions", status_code=200)
async def complete(data: dict[str, Any]) -> Stream:
    """Write the events."""
    return Stream(_events(data["max_tokens"]), media_type="text/event-stream")


@get("/health")
async def health() -> str:
    """Ready."""
    return "ready"


app = Litestar([complete, health], openapi_config=None)
