"""The only writer of streamed responses, in the frame of a surface: server-sent events, or lines of JSON.

An error after the first byte becomes a chunk and ends the body without the frame's last bytes, so that clients do not
mistake a truncated response for a complete one. While nothing is generated (queue, prefill), pings keep proxies from
closing the connection. Writes ASGI messages itself: one per batch of events, where Litestar's ``ServerSentEvent``
sends one per event and cannot end a stream with an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence

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

__all__ = ["ResponseStream", "stream_headers", "write_chunks"]


_log = logging.getLogger("enginehouse.server")


def stream_headers(frame: Frame) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response in that frame."""
    return [
        (b"content-type", frame.media_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the events
    ]


def write_chunks(frame: Frame, chunks: Iterable[Chunk | msgspec.Raw]) -> bytes:
    """Return chunks as bytes."""
    before, after = frame.before, frame.after
    return b"".join([before + encode_line(chunk) + after for chunk in chunks])


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
        self._send = send
        self._exchange = exchange
        self._frame = frame
        self._assembler = assembler
        self._profile = profile
        self._headers = [*stream_headers(frame), *((name.encode(), value.encode()) for name, value in headers)]
        self._is_sending = False

    async def write(
        self,
        assembly: Assembly,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        details: AnswerDetails | None,
    ) -> None:
        """Write everything; returns when the response is complete, has failed, or the client has disconnected."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        try:
            await self._write(write_chunks(self._frame, self._assembler.opening()) or self._frame.ping)
            self._exchange.on_idle = self._ping
            tail = await self._write_pieces(assembly, batches, details)
        except Exception as error:  # noqa: BLE001 - request guard: the status is sent, so it becomes a chunk
            tail = self._failure(assembly, error)
        finally:
            self._exchange.on_idle = None
        if not self._exchange.disconnected:
            await self._send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _write_pieces(
        self,
        assembly: Assembly,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        details: AnswerDetails | None,
    ) -> bytes:
        """Write the pieces as they arrive; returns the last bytes of the body."""
        push, sent, chunks_of = assembly.push, assembly.sent, self._assembler.push
        before, after = self._frame.before, self._frame.after
        async for prompt, events in batches:
            pieces: list[Piece] = []
            for item in events:
                push(prompt, item, pieces)
            if pieces:
                written = b""
                for piece in pieces:  # plain loops: this runs for every token
                    for chunk in chunks_of(piece):
                        written += before + encode_line(chunk) + after
                if written:
                    await self._write(written)
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

    async def _write(self, data: bytes) -> None:
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._exchange.sent()

    async def _ping(self) -> None:
        # A client that does not read blocks the write; a ping after it would have no effect.
        if not self._is_sending:
            await self._write(self._frame.ping)
