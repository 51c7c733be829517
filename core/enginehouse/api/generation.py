"""Answers a generating request, streamed or whole: submit, then write. Shared by all generating endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from attrs import frozen
from litestar.types import Receive, Scope, Send

from enginehouse.api.access import RECORD_KEY, AccessRecord
from enginehouse.api.answer import Assembly, Dialect, event_batches
from enginehouse.api.decoding import Decoded, GenerationBody
from enginehouse.api.exchange import Exchange
from enginehouse.api.sse import EventStream
from enginehouse.api.state import ApiState
from enginehouse.pipeline import RunningRequest
from enginehouse.types import GenerateRequest

__all__ = ["GenerationResponse"]


@frozen(eq=False, kw_only=True)
class GenerationResponse:
    """An ASGI response. What is refused is raised before its first byte.

    Attributes:
        requests: one per prompt.
        dialect: makes the writer of this answer, once every prompt has been accepted.
    """

    state: ApiState
    decoded: Decoded[GenerationBody]
    requests: Sequence[GenerateRequest]
    dialect: Callable[[Assembly], Dialect]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, wait for the answer and send it; stops as soon as the client leaves."""
        record: AccessRecord = scope[RECORD_KEY]  # type: ignore[literal-required]
        record.request_id = self.requests[0].request_id
        record.stream = self.decoded.body.stream
        async with self.state.exchanges.open(receive, self.state.settings.server.ping_s) as exchange:
            running = await self._submit(exchange)
            if running is None:
                _give_up(exchange, record)
                return
            record.model = running[0].model.name
            assembly = Assembly(running, self.decoded.body.n, record)
            dialect = self.dialect(assembly)
            headers = [("x-request-id", self.requests[0].request_id), *self.decoded.headers()]
            if self.decoded.body.stream:
                include_usage = self.decoded.body.include_usage
                stream = EventStream(send, exchange, dialect, include_usage=include_usage, headers=headers)
                await stream.write(assembly, event_batches(running))
                return
            choices = await assembly.fold(event_batches(running))
            if exchange.is_ended:
                _give_up(exchange, record)
                return
            assembly.complete()
            await _send_json(send, dialect.whole(choices, assembly.usage()), headers)

    async def _submit(self, exchange: Exchange) -> list[RunningRequest] | None:
        """Bring every prompt to the engine; None when the exchange ended meanwhile."""

        async def submit(request: GenerateRequest) -> RunningRequest:
            running = await self.state.pipeline.submit(request)
            exchange.hold(running.generation)
            return running

        if len(self.requests) == 1:
            running = await exchange.until_ended(submit(self.requests[0]))
            return None if running is None else [running]
        submitted: list[RunningRequest] | None = await exchange.until_ended(
            asyncio.gather(*(submit(request) for request in self.requests))
        )
        return submitted


async def _send_json(send: Send, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
    fields = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    encoded = [(name.encode(), value.encode()) for name, value in fields]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _give_up(exchange: Exchange, record: AccessRecord) -> None:
    """End without an answer: nobody reads it, or the server says why."""
    if exchange.error is not None:
        raise exchange.error
    record.outcome = "cancelled"
