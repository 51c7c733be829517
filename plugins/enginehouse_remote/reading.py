"""Reads responses of servers within a limit of bytes on the wire.

Nothing is decompressed: a few bytes of gzip may expand to gigabytes, so servers are asked for ``identity`` and refused
if they send anything else. Callers limit the time. Does not know the meaning of responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx
from attrs import frozen

from enginehouse.contract.types import EngineRequest

__all__ = [
    "IDENTITY",
    "_MAX_ERROR_BYTES",
    "AnswerLimits",
    "AnswerUnreadable",
    "pieces_of",
    "read_beginning",
    "read_body",
]

IDENTITY = {"accept-encoding": "identity"}
"""Header of every request to a server."""

_MAX_ERROR_BYTES = 64 * 1024
"""Maximum length of an error's text; the rest is not read."""

_PIECE_BYTES = 64
"""Minimum size that a piece counts for, so that one-byte pieces cannot be sent by the million."""

_TURN_PIECES = 64
_FIXED_BYTES = 1024 * 1024
_TOKEN_BYTES = 2048
_ALTERNATIVE_BYTES = 512
_MOST_BYTES = 256 * 1024 * 1024
_FIXED_EVENTS = 64
_TOKEN_EVENTS = 4


class AnswerUnreadable(httpx.HTTPError):
    """A response is compressed, or larger than allowed."""


@frozen
class AnswerLimits:
    """Limits of a response, a multiple of what it needs; a response beyond them is considered endless.

    Attributes:
        max_bytes: size of the whole stream.
        max_events: pieces of text, reasoning and calls.
    """

    max_bytes: int
    max_events: int

    @classmethod
    def of(cls, request: EngineRequest, max_context: int) -> AnswerLimits:
        """Return the limits of the answer to ``request``."""
        asked = request.stopping.max_tokens
        num_tokens = min(max_context if asked is None else asked, max_context) * request.num_choices
        num_alternatives = 0 if request.sampling.num_logprobs is None else request.sampling.num_logprobs + 1
        num_bytes = _FIXED_BYTES + num_tokens * (_TOKEN_BYTES + num_alternatives * _ALTERNATIVE_BYTES)
        return cls(min(num_bytes, _MOST_BYTES), _FIXED_EVENTS + _TOKEN_EVENTS * num_tokens)


async def pieces_of(response: httpx.Response, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the body of an open response as it arrives.

    Raises:
        AnswerUnreadable: it is compressed, or has more bytes.
        httpx.HTTPError: the connection broke.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise AnswerUnreadable(f"its answer is compressed ({encoding[:20]!r}), which it was asked not to do")
    left, number = max_bytes, 0
    async for piece in response.aiter_raw():
        left -= max(len(piece), _PIECE_BYTES)
        number += 1
        if number % _TURN_PIECES == 0:
            await asyncio.sleep(0)  # one read may return thousands of tiny pieces
        if left < 0:
            raise AnswerUnreadable(f"its answer does not end: it has more than {max_bytes} bytes")
        yield piece


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Read the whole body of an open response; raises like :func:`pieces_of`."""
    return b"".join([piece async for piece in pieces_of(response, max_bytes)])


async def read_beginning(response: httpx.Response, max_bytes: int = _MAX_ERROR_BYTES) -> bytes:
    """Read the body of an open response up to a limit, dropping the rest. For error messages."""
    read: list[bytes] = []
    try:
        async for piece in pieces_of(response, max_bytes):
            read.append(piece)
    except AnswerUnreadable:
        pass
    return b"".join(read)
