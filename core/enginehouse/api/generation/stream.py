"""Responses on the way to the client: the chunks of a streamed generation, and the replies of routes without one.

Called by ``response`` and by the routes of surfaces. The bytes around each chunk are those of the surface's frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from attrs import frozen
from litestar.types import Receive, Scope, Send

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.details import AnswerDetails
from enginehouse.api.generation.surface_calls import SurfaceCalls
from enginehouse.api.http.access import record_of
from enginehouse.api.http.errors import describe, error_body, for_client
from enginehouse.api.http.exchange import Exchange
from enginehouse.api.http.frames import FrameWriter, chunk_writer, encode_json, send_body, write_chunks
from enginehouse.api.http.security import written_error
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import EnginehouseError, PluginFailed
from enginehouse.contract.surface import Assembler, Chunk, Frame, Reply
from enginehouse.contract.types import Event
from enginehouse.settings.profiles import Profile


class ResponseStream:
    """Writes one streamed response.

    Args:
        surface: calls the assembler.
        profile: determines the error codes.
        headers: further response headers.
    """

    def __init__(
        self,
        send: Send,
        exchange: Exchange,
        frame: Frame,
        assembler: Assembler,
        surface: SurfaceCalls,
        *,
        profile: Profile,
        headers: Sequence[tuple[str, str]],
    ) -> None:
        self._writer = FrameWriter(send, exchange, frame, headers)
        self._exchange = exchange
        self._frame = frame
        self._assembler = assembler
        self._surface = surface
        self._profile = profile

    async def write(
        self,
        assembly: Assembly,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        details: AnswerDetails | None,
    ) -> None:
        """Write everything; returns when the response is complete, has failed, or the client has disconnected."""
        writer, surface = self._writer, self._surface
        await writer.begin()
        try:
            opening = await self._written("opening", self._assembler.opening)
            await writer.write(opening or self._frame.ping)
            writer.ping_when_idle()
            chunks_of, written_of = self._assembler.push, chunk_writer(self._frame)
            async for prompt, events in batches:  # plain loops: this runs for every token
                if assembly.are_foreign:
                    pieces = await assembly.read(prompt, events)
                else:
                    pieces = assembly.pieces(prompt, events)
                written = b""
                for piece in pieces:
                    if surface.is_foreign:
                        written += await self._written("push", chunks_of, piece)
                        continue
                    for chunk in chunks_of(piece):
                        written += written_of(chunk)
                if written:
                    await writer.write(written)
                if pieces and pieces[-1].scores is None and pieces[-1].progress is None:
                    assembly.sent(pieces)
            tail = await self._end(assembly, details)
        except Exception as error:  # noqa: BLE001 - guard of a request: any error becomes a chunk, and ends this stream only
            tail = await self._failure(assembly, error)
        await writer.end(tail)

    async def _end(self, assembly: Assembly, details: AnswerDetails | None) -> bytes:
        """Return the last bytes of the body, after the last piece."""
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._exchange.disconnected:
            assembly.record.outcome = "cancelled"
            return b""
        assembly.complete()
        usage, plain = assembly.usage(), None if details is None else details.to_plain()
        return await self._written("close", self._assembler.close, usage, plain) + self._frame.last

    async def _written(self, place: str, function: Callable[..., Iterable[Chunk | bytes]], *arguments: Any) -> bytes:
        """Return the chunks that a function of the assembler gives, as bytes."""
        chunks = partial(self._surface.chunks, place, function, *arguments)
        return await self._surface.ask(place, lambda: write_chunks(self._frame, chunks()))

    async def _failure(self, assembly: Assembly, error: Exception) -> bytes:
        """Return the chunk with the error. Other choices of the request are stopped, as their output is lost."""
        self._exchange.cancel()
        if self._exchange.disconnected and isinstance(error, EnginehouseError):
            assembly.record.outcome = "cancelled"
            return b""
        answer = describe(error, assembly.record.identify())
        assembly.record.outcome = answer.code
        told = for_client(answer, self._profile)
        with contextlib.suppress(PluginFailed), self._surface.guard.calling("fail", passes=(PluginFailed,)):
            return await self._written("fail", self._assembler.fail, told) + self._frame.last_failed
        return write_chunks(self._frame, [error_body(told)])


@frozen(eq=False)
class ReplyResponse:
    """An ASGI response; a stream ends when its chunks do, its client disconnects or the server stops."""

    state: ApiState
    call: DecodedCall[Any]
    reply: Reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body, or the chunks as they come."""
        reply = self.reply
        if reply.stream is not None:
            await self._stream(reply.stream, scope, receive, send)
            return
        body = encode_json(reply.body) if isinstance(reply.body, dict | list) else reply.body or b""
        headers = [("content-type", reply.media_type), *reply.headers, *self.call.notices()]
        await send_body(send, body, headers, reply.status or 200)

    async def _stream(self, stream: AsyncIterator[Chunk | bytes], scope: Scope, receive: Receive, send: Send) -> None:
        frame, headers = self.reply.frame, [*self.reply.headers, *self.call.notices()]
        async with self.state.exchanges.open(receive, self.state.settings.server.ping_s) as exchange:
            writer = FrameWriter(send, exchange, frame, headers)
            await writer.begin(self.reply.status or 200)
            writer.ping_when_idle()

            async def write() -> bytes:
                written = chunk_writer(frame)
                while (chunk := await exchange.until_ended(anext(stream, None))) is not None:
                    await writer.write(written(chunk))
                if exchange.error is not None:
                    raise exchange.error
                if exchange.disconnected:
                    record_of(scope).outcome = "cancelled"
                return frame.last

            async def failure(error: Exception) -> bytes:
                answer = describe(error, record_of(scope).identify())
                record_of(scope).outcome = answer.code
                *_, body = await written_error(answer, scope)
                return write_chunks(frame, [body])

            try:
                tail = await write()
            except Exception as error:  # noqa: BLE001 - guard of a request, as above
                tail = await failure(error)
            finally:
                if (close := getattr(stream, "aclose", None)) is not None:
                    await close()
            await writer.end(tail)
