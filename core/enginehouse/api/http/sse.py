"""The writers of streamed responses, in the frame of a surface: server-sent events, or lines of JSON.

An error after the first byte becomes a chunk and ends the body without the frame's last bytes, so that clients do not
mistake a truncated response for a complete one. While nothing is generated (queue, prefill), pings keep proxies from
closing the connection. Writes ASGI messages itself: one per batch of events, where Litestar's ``ServerSentEvent``
sends one per event and cannot end a stream with an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec
from litestar.types import Send

from enginehouse.api.http.errors import describe, error_body, for_client
from enginehouse.api.http.exchange import Exchange
from enginehouse.api.openai.answer import Assembly
from enginehouse.api.openai.details import AnswerDetails
from enginehouse.api.openai.encoding import encode_line
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.surface import Assembler, Chunk, Frame, Piece
from enginehouse.contract.types import Event
from enginehouse.settings.profiles import Profile

__all__ = ["FrameWriter", "ResponseStream", "chunk_writer", "send_body", "stream_headers", "write_chunks"]


_log = logging.getLogger("enginehouse.server")


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


def chunk_writer(frame: Frame) -> Callable[[Chunk | msgspec.Raw], bytes]:
    """Return the function that writes one chunk; it runs for every token."""
    before, after, member = frame.before, frame.after, frame.event
    if member is None:
        return lambda chunk: before + encode_line(chunk) + after
    named = msgspec.defstruct("Named", [(member, str, "")])
    name_of = msgspec.json.Decoder(named).decode

    def write(chunk: Chunk | msgspec.Raw) -> bytes:
        name = getattr(name_of(chunk), member) if isinstance(chunk, msgspec.Raw) else chunk.get(member, "")
        line = f"event: {name}\n".encode() if name else b""
        return line + before + encode_line(chunk) + after

    return write


def write_chunks(frame: Frame, chunks: Iterable[Chunk | msgspec.Raw]) -> bytes:
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


class ResponseStream:
    """Writes one streamed response.

    Args:
        profile: determines the error codes.
        headers: further response headers.
    """

    def __init__(
        self,
        send: Send,
        exchange: Exchange,
        frame: Frame,
        assembler: Assembler,
        *,
        profile: Profile,
        headers: Sequence[tuple[str, str]],
    ) -> None:
        self._writer = FrameWriter(send, exchange, frame, headers)
        self._exchange = exchange
        self._frame = frame
        self._assembler = assembler
        self._profile = profile

    async def write(
        self,
        assembly: Assembly,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        details: AnswerDetails | None,
    ) -> None:
        """Write everything; returns when the response is complete, has failed, or the client has disconnected."""
        writer = self._writer
        await writer.begin()
        try:
            await writer.write(write_chunks(self._frame, self._assembler.opening()) or self._frame.ping)
            writer.ping_when_idle()
            tail = await self._write_pieces(assembly, batches, details)
        except Exception as error:  # noqa: BLE001 - request guard: the status is sent, so it becomes a chunk
            tail = self._failure(assembly, error)
        await writer.end(tail)

    async def _write_pieces(
        self,
        assembly: Assembly,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        details: AnswerDetails | None,
    ) -> bytes:
        """Write the pieces as they arrive; returns the last bytes of the body."""
        push, sent, chunks_of = assembly.push, assembly.sent, self._assembler.push
        write, written_of = self._writer.write, chunk_writer(self._frame)
        async for prompt, events in batches:
            pieces: list[Piece] = []
            for item in events:
                push(prompt, item, pieces)
            if pieces:
                written = b""
                for piece in pieces:  # plain loops: this runs for every token
                    for chunk in chunks_of(piece):
                        written += written_of(chunk)
                if written:
                    await write(written)
                if pieces[-1].scores is None:
                    sent(pieces)
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._exchange.disconnected:
            assembly.record.outcome = "cancelled"
            return b""
        assembly.complete()
        last = self._assembler.close(assembly.usage(), None if details is None else details.to_plain())
        return write_chunks(self._frame, last) + self._frame.last

    def _failure(self, assembly: Assembly, error: Exception) -> bytes:
        """Return the chunk with the error. Other choices of the request are stopped, as their output is lost."""
        self._exchange.cancel()
        if self._exchange.disconnected and isinstance(error, EnginehouseError):
            assembly.record.outcome = "cancelled"
            return b""
        answer = describe(error, assembly.record.identify())
        assembly.record.outcome = answer.code
        told = for_client(answer, self._profile)
        try:
            return write_chunks(self._frame, self._assembler.fail(told))
        except Exception:  # noqa: BLE001 - guard: a plugin's failure must not hide the error
            _log.exception("the surface of %s could not write an error", assembly.record.endpoint)
            return write_chunks(self._frame, [error_body(told)])
