"""Writes the responses of routes that do not generate: one body, or a stream in the frame of its surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from attrs import frozen
from litestar.types import Receive, Scope, Send

from enginehouse.api.generation.decoding import Decoded
from enginehouse.api.generation.encoding import encode_json
from enginehouse.api.http.access import record_of
from enginehouse.api.http.errors import describe
from enginehouse.api.http.security import written_error
from enginehouse.api.http.sse import FrameWriter, chunk_writer, send_body, write_chunks
from enginehouse.api.http.state import ApiState
from enginehouse.contract.surface import Chunk, Reply

__all__ = ["ReplyResponse"]


@frozen(eq=False)
class ReplyResponse:
    """An ASGI response; a stream ends when its chunks do, its client disconnects or the server stops."""

    state: ApiState
    call: Decoded[Any]
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

    async def _stream(
        self, stream: AsyncIterator[Chunk | msgspec.Raw], scope: Scope, receive: Receive, send: Send
    ) -> None:
        frame, headers = self.reply.frame, [*self.reply.headers, *self.call.notices()]
        async with self.state.exchanges.open(receive, self.state.settings.server.ping_s) as exchange:
            writer = FrameWriter(send, exchange, frame, headers)
            written, tail = chunk_writer(frame), frame.last
            await writer.begin(self.reply.status or 200)
            writer.ping_when_idle()
            try:
                while (chunk := await exchange.until_ended(anext(stream, None))) is not None:
                    await writer.write(written(chunk))
                if exchange.error is not None:
                    raise exchange.error
                if exchange.disconnected:
                    record_of(scope).outcome = "cancelled"
            except Exception as error:  # noqa: BLE001 - request guard: the status is sent, so it becomes a chunk
                answer = describe(error, record_of(scope).identify())
                record_of(scope).outcome = answer.code
                *_, body = await written_error(answer, scope)
                tail = write_chunks(frame, [msgspec.Raw(body)])
            finally:
                if (close := getattr(stream, "aclose", None)) is not None:
                    await close()
            await writer.end(tail)
