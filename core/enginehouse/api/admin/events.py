"""``/admin/events``: the events of models (states, loads, downloads) and of requests as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import attrs
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from enginehouse.api.http.frames import stream_headers, write_chunks
from enginehouse.api.http.state import ApiState
from enginehouse.contract.surface import SSE
from enginehouse.serving.lifecycle import Subscription

_POLL_S = 0.5
"""Seconds between two checks for a server shutdown, which this stream would otherwise delay."""


def event_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""

    @get("/admin/events")
    async def stream_events() -> ASGIApp:
        """Stream the events of models and requests from now on."""
        return _EventsResponse(state)

    return stream_events


@attrs.frozen(eq=False)
class _EventsResponse:
    """An ASGI response that ends when its client leaves or the server stops."""

    state: ApiState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the server stops."""
        models, requests = self.state.manager.events, self.state.exchanges.events
        with models.subscribe() as subscription, requests.subscribe(subscription):
            await send({"type": "http.response.start", "status": 200, "headers": stream_headers(SSE)})
            await send({"type": "http.response.body", "body": SSE.ping, "more_body": True})
            left = asyncio.create_task(_client_left(receive))
            try:
                await self._send_events(subscription, left, send)
            finally:
                left.cancel()
            if not left.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, subscription: Subscription[Any], left: asyncio.Task[None], send: Send) -> None:
        loop = asyncio.get_running_loop()
        last_sent, num_lost = loop.time(), 0
        while not (left.done() or self.state.exchanges.stopping):
            body = b""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    body = _encoded(attrs.asdict(await subscription.next()))
            if subscription.num_lost > num_lost:
                body = _encoded({"kind": "lost", "count": subscription.num_lost - num_lost}) + body
                num_lost = subscription.num_lost
            if not body and loop.time() - last_sent >= self.state.settings.server.ping_s:
                body = SSE.ping
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                last_sent = loop.time()


def _encoded(members: dict[str, Any]) -> bytes:
    return write_chunks(SSE, [members])


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
