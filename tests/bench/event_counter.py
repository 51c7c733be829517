"""A client so cheap that the server stays the bottleneck: it counts a mark in bytes and parses nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from attrs import frozen

__all__ = ["SURFACES", "EventCount", "StreamedSurface", "count_events"]

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_NUM_KEPT = 13  # the longest marker


@frozen
class StreamedSurface:
    """How a stream is requested from one API.

    Attributes:
        limit: name of the field with the limit of tokens; in ``options`` if it is Ollama's.
        mark: bytes that every event has once.
    """

    name: str
    path: str
    limit: str
    body: dict[str, Any]
    mark: bytes = b"data: "

    def to_bytes(self, max_tokens: int) -> bytes:
        """Return the body of a request."""
        limit = {self.limit: max_tokens}
        limits = {"options": limit} if self.limit == "num_predict" else limit
        return msgspec.json.encode({"model": "script", "stream": True, **self.body, **limits})


_CHAT = {"messages": [{"role": "user", "content": "Go."}]}
SURFACES = (
    StreamedSurface("OpenAI chat", "/v1/chat/completions", "max_tokens", _CHAT),
    StreamedSurface("Responses", "/v1/responses", "max_output_tokens", {"input": "Go."}),
    StreamedSurface("Messages", "/v1/messages", "max_tokens", _CHAT),
    StreamedSurface("Ollama", "/api/chat", "num_predict", _CHAT, b'"created_at":'),
    StreamedSurface("llama-server", "/completion", "n_predict", {"prompt": "Go."}),
)
"""The first one is what the others are compared with."""


@frozen
class EventCount:
    """Events of all streams, the time from first request to last byte, and the CPU time used here."""

    num_events: int
    wall_s: float
    client_cpu_s: float

    @property
    def events_per_s(self) -> float:
        """Events over all streams, per second."""
        return self.num_events / self.wall_s


def count_events(url: str, num_streams: int, max_tokens: int, surface: StreamedSurface = SURFACES[0]) -> EventCount:
    """Open ``num_streams`` connections at once, ask each for a stream of ``max_tokens`` and read all of it.

    Raises:
        ConnectionError: a connection was lost, or did not answer with 200.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_count(url, num_streams, max_tokens, surface))


async def _count(url: str, num_streams: int, max_tokens: int, surface: StreamedSurface) -> EventCount:
    address = urlsplit(url)
    host, port = address.hostname or "localhost", address.port or 80
    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(lambda: _Stream(surface.mark), host, port))[1] for _ in range(num_streams)]
    request = _request(address.netloc, surface.path, surface.to_bytes(max_tokens))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    for stream in streams:
        stream.send(request)
    await asyncio.gather(*(stream.finished for stream in streams))
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    for stream in streams:
        stream.close()
    return EventCount(sum(stream.num_events for stream in streams), wall_s, cpu_s)


def _request(host: str, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Stream(asyncio.Protocol):
    """One connection: counts events until the last HTTP chunk."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self.num_events = 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = b""  # of what came so far, as a marker may be cut in two
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        seen = self._end + data
        if not self._end and not seen.startswith(b"HTTP/1.1 200"):
            self._fail(ConnectionError(seen[:500].decode(errors="replace")))
            return
        self.num_events += seen.count(self._mark) - self._end.count(self._mark)
        self._end = seen[-_NUM_KEPT:]
        if self._end.endswith(_LAST_CHUNK) and not self.finished.done():
            self.finished.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionError(f"The connection was lost: {error}"))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _fail(self, error: ConnectionError) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
