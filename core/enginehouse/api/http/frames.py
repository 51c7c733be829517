"""Frames of surfaces: the bytes of streamed responses as server-sent events or lines of JSON, and JSON as bytes.

An error after the first byte becomes a chunk and ends the body without the frame's last bytes, so that clients do not
mistake a truncated response for a complete one. While nothing is generated (queue, prefill), pings keep proxies from
closing the connection. Writes ASGI messages itself: one per batch of events, where Litestar's ``ServerSentEvent``
sends one per event and cannot end a stream with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from litestar.types import Send

from enginehouse.api.http.exchange import Exchange
from enginehouse.contract.surface import Chunk, Frame

encode_json = msgspec.json.Encoder().encode
"""Encodes plain data to JSON bytes."""

_LINE_BREAKS = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\x85".encode(), b"\\u0085"),
)
"""Characters that JSON allows unescaped, but at which careless stream readers split lines."""


def encode_line(value: Any) -> bytes:
    """Encode JSON that stays on one line for every client."""
    return encode_chunk(encode_json(value))


def encode_chunk(chunk: Chunk | bytes) -> bytes:
    """Encode a chunk as :func:`encode_line` does, unless it is JSON already; this runs for every token."""
    encoded = chunk if type(chunk) is bytes else encode_json(chunk)
    if not encoded.isascii():
        for raw, escaped in _LINE_BREAKS:
            if raw in encoded:
                encoded = encoded.replace(raw, escaped)
    return encoded


def stream_headers(frame: Frame) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response in that frame."""
    return [
        (b"content-type", frame.media_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the events
    ]


async def send_body(send: Send, body: bytes, headers: Sequence[tuple[str, str]], status: int = 200) -> None:
    """Send a response that is not streamed."""
    fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    fields.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def chunk_writer(frame: Frame) -> Callable[[Chunk | bytes], bytes]:
    """Return the function that writes one chunk; it runs for every token."""
    before, after, member = frame.before, frame.after, frame.event
    if member is None:
        return lambda chunk: before + encode_chunk(chunk) + after
    decode = msgspec.json.Decoder(msgspec.defstruct("Named", [(member, str, "")])).decode
    opening = b'{"%b":"' % member.encode()
    start = len(opening)
    beginning, head = b"event", before  # of the last chunk with its name first; JSON never begins so

    def write(chunk: Chunk | bytes) -> bytes:
        nonlocal beginning, head
        encoded = encode_chunk(chunk)
        if encoded.startswith(beginning):  # the usual case: the same event again
            return head + encoded + after
        end = encoded.find(b'"', start) if encoded.startswith(opening) else -1
        if end > start and b"\\" not in encoded[start:end]:
            beginning, head = encoded[: end + 1], b"event: %b\n%b" % (encoded[start:end], before)
            return head + encoded + after
        name = getattr(decode(encoded), member).encode()  # escaped, empty, or not the first member
        return b"event: %b\n%b%b%b" % (name, before, encoded, after) if name else before + encoded + after

    return write


def write_chunks(frame: Frame, chunks: Iterable[Chunk | bytes]) -> bytes:
    """Return chunks as bytes."""
    return b"".join(map(chunk_writer(frame), chunks))


class FrameWriter:
    """Sends one streamed response in a frame, with pings while nothing else is sent.

    Args:
        headers: further response headers.
    """

    def __init__(self, send: Send, exchange: Exchange, frame: Frame, headers: Sequence[tuple[str, str]]) -> None:
        self._send = send
        self._exchange = exchange
        self._ping_bytes = frame.ping
        self._headers = [*stream_headers(frame), *((name.encode(), value.encode()) for name, value in headers)]
        self._is_sending = False

    async def begin(self, status: int = 200) -> None:
        """Send the head."""
        await self._send({"type": "http.response.start", "status": status, "headers": self._headers})

    def ping_when_idle(self) -> None:
        """Send pings from now on, until :meth:`end`."""
        self._exchange.on_idle = self._ping

    async def write(self, data: bytes) -> None:
        """Send part of the body."""
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._exchange.sent()

    async def end(self, tail: bytes) -> None:
        """Send the last bytes of the body, unless the client has disconnected."""
        self._exchange.on_idle = None
        if not self._exchange.disconnected:
            await self._send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _ping(self) -> None:
        # A client that does not read blocks the write; a ping after it would have no effect.
        if not self._is_sending:
            await self.write(self._ping_bytes)
