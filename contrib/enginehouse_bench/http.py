"""Requests to an OpenAI-compatible server with minimal work per event.

Uses plain asyncio streams: a load generator with much computation measures itself. Each request has its own connection.
Supports HTTP/1.1 as far as such servers use it. Does not know load or metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

__all__ = ["RequestFailed", "post", "stream_chat"]

_MAX_LINE_BYTES = 1024 * 1024
_MAX_ERROR_BYTES = 4096


class RequestFailed(Exception):
    """A request got no complete answer; ``reason`` is short enough for grouping."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def stream_chat(url: str, body: bytes, key: str | None) -> AsyncGenerator[dict[str, Any]]:
    """POST a streaming request to ``url`` and yield the chunks of its answer as they arrive.

    Raises:
        RequestFailed: the server refused it, broke off, or could not be reached.
    """
    async with _posted(url, body, key) as pieces:
        async for line in _events(pieces):
            if line == b"[DONE]":
                return
            chunk = json.loads(line)
            if "error" in chunk:
                raise RequestFailed(f"error in the stream: {_message(chunk)}")
            yield chunk
        raise RequestFailed("a stream ended without [DONE]")


async def post(url: str, body: bytes, key: str | None) -> bytes:
    """POST a request and return the body of its answer.

    Raises:
        RequestFailed: the server refused it, broke off, or could not be reached.
    """
    async with _posted(url, body, key) as pieces:
        return b"".join([piece async for piece in pieces])


@contextlib.asynccontextmanager
async def _posted(url: str, body: bytes, key: str | None) -> AsyncIterator[AsyncIterator[bytes]]:
    """POST a request; gives the pieces of its answer's body. Raises RequestFailed as the functions above do."""
    parts = urlsplit(url)
    try:
        async with _connected(parts) as (reader, writer):
            writer.write(_head(parts, body, key) + body)
            await writer.drain()
            status, headers = await _read_head(reader)
            pieces = _chunked(reader) if headers.get("transfer-encoding") == "chunked" else _plain(reader, headers)
            if status != 200:
                raise RequestFailed(f"{status} {await _error(pieces)}".strip())
            yield pieces
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise RequestFailed(f"connection: {type(error).__name__}") from error


@contextlib.asynccontextmanager
async def _connected(parts: SplitResult) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
        limit=_MAX_LINE_BYTES,
    )
    try:
        yield reader, writer
    finally:
        writer.close()


def _head(parts: SplitResult, body: bytes, key: str | None) -> bytes:
    lines = [
        f"POST {parts.path or '/'} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    return int(head[0].split(" ")[1]), headers


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the parts of a body in HTTP's chunked encoding."""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _plain(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield a body of known length, or one that ends with the connection."""
    left = int(headers.get("content-length", -1))
    while left and (data := await reader.read(65536 if left < 0 else min(left, 65536))):
        left -= len(data) if left > 0 else 0
        yield data


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data after ``data:`` of each line."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _error(parts: AsyncIterator[bytes]) -> str:
    body = b""
    async for part in parts:
        body += part
        if len(body) > _MAX_ERROR_BYTES:
            break
    try:
        return _message(json.loads(body))
    except ValueError:
        return body[:80].decode("utf-8", "replace")


def _message(data: Any) -> str:
    error = data.get("error") if isinstance(data, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error)[:160]
