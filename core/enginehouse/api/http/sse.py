"""The only writer of server-sent events.

Order: the dialect's opening, one event per piece, the usage event if requested, ``[DONE]``. An error after the first
byte becomes ``data: {"error": {...}}`` and ends the body without ``[DONE]``, so that clients do not mistake a truncated
response for a complete one. While nothing is generated (queue, prefill), the comment ``: ping`` keeps proxies from
closing the connection. Writes ASGI messages itself: one per batch of events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from litestar.types import Send

from enginehouse.api.http.errors import describe
from enginehouse.api.http.exchange import Exchange
from enginehouse.api.openai.answer import Assembly, Dialect
from enginehouse.api.openai.choice_parser import Piece
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import Event
from enginehouse.settings.profiles import Profile

__all__ = ["EVENT_STREAM_HEADERS", "PING", "EventStream", "event"]

_DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the events
)


def event(payload: bytes) -> bytes:
    """Return one event; ``payload`` is one line of JSON."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """Writes one streamed response.

    Args:
        include_usage: end with the dialect's usage event.
        profile: determines the error codes.
        headers: further response headers.
    """

    def __init__(
        self,
        send: Send,
        exchange: Exchange,
        dialect: Dialect,
        *,
        include_usage: bool,
        profile: Profile,
        headers: Sequence[tuple[str, str]],
    ) -> None:
        self._send = send
        self._exchange = exchange
        self._dialect = dialect
        self._include_usage = include_usage
        self._profile = profile
        self._headers = [*EVENT_STREAM_HEADERS, *((name.encode(), value.encode()) for name, value in headers)]
        self._is_sending = False

    async def write(self, assembly: Assembly, batches: AsyncIterator[tuple[int, Sequence[Event]]]) -> None:
        """Write everything; returns when the response is complete, has failed, or the client has disconnected."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._write(self._dialect.opening() or PING)
        self._exchange.on_idle = self._ping
        try:
            tail = await self._write_pieces(assembly, batches)
        except Exception as error:  # noqa: BLE001 - request guard: the status is sent, so it becomes an event
            tail = self._failure(assembly, error)
        finally:
            self._exchange.on_idle = None
        if not self._exchange.disconnected:
            await self._send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _write_pieces(self, assembly: Assembly, batches: AsyncIterator[tuple[int, Sequence[Event]]]) -> bytes:
        """Write the pieces as they arrive; returns the last bytes of the body."""
        push, encode, sent = assembly.push, self._dialect.event, assembly.sent
        async for prompt, events in batches:
            pieces: list[Piece] = []
            for item in events:
                push(prompt, item, pieces)
            if pieces:
                await self._write(encode(pieces[0]) if len(pieces) == 1 else b"".join(map(encode, pieces)))
                if pieces[-1].scores is None:
                    sent(pieces)
        if self._exchange.error is not None:
            raise self._exchange.error
        if self._exchange.disconnected:
            assembly.record.outcome = "cancelled"
            return b""
        assembly.complete()
        dialect = self._dialect
        return (dialect.usage_event(assembly.usage()) if self._include_usage else dialect.flush()) + _DONE

    def _failure(self, assembly: Assembly, error: Exception) -> bytes:
        """Return the error event. Other choices of the request are stopped, as their output is lost."""
        self._exchange.cancel()
        if self._exchange.disconnected and isinstance(error, EnginehouseError):
            assembly.record.outcome = "cancelled"
            return b""
        answer = describe(error, assembly.record.identify())
        assembly.record.outcome = answer.code
        return self._dialect.flush() + event(answer.body(self._profile))

    async def _write(self, data: bytes) -> None:
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False
        self._exchange.sent()

    async def _ping(self) -> None:
        # A client that does not read blocks the write; a ping after it would have no effect.
        if not self._is_sending:
            await self._write(PING)
