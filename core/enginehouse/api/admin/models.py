"""``/admin/models``, ``/admin/events``, ``/admin/reload``: models, their memory, events, and changes of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal, cast

import attrs
from attrs import field, frozen
from attrs.validators import ge, optional
from litestar import Request, delete, get, post
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from enginehouse.api.admin.adapters import add_adapter, describe_adapters, read_added, remove_adapter
from enginehouse.api.generation.decoding import refusal_of
from enginehouse.api.http.body import parse_object, read_body, read_empty_body
from enginehouse.api.http.sse import stream_headers, write_chunks
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.surface import SSE
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.serving.changing import load_model, unload_model
from enginehouse.serving.lifecycle import Subscription
from enginehouse.settings.structuring import converting, strict_converter

_Order = Literal["load", "unload", "adapters"]


@frozen(kw_only=True)
class UnloadBody:
    """The body of ``/admin/models/{id}/unload``; it may be empty.

    Attributes:
        drain: let running requests finish; new ones wait until the model is loaded again.
        force: end running requests, or a load, and unload a pinned model; with ``drain``, end only the requests that do
            not finish in time.
        drain_s: seconds that running requests get; unset means ``limits.drain_s``.
    """

    drain: bool = False
    force: bool = False
    drain_s: float | None = field(default=None, validator=optional(ge(0)))


def admin_model_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """Return the routes."""
    manager = state.manager
    limit = state.settings.limits.max_body_bytes

    @get("/admin/models")
    async def list_served_models() -> dict[str, Any]:
        """List all models with their state and memory."""
        data = [describe_model(manager, status) for status in manager.statuses()]
        return {"object": "list", "data": data, "memory": _describe_memory(manager)}

    @get("/admin/models/{model_id:path}")
    async def show_served_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show one model, by its name or an alias, or the adapters of one."""
        name, slash, last = _path_of(request).rpartition("/")
        if slash and last == "adapters":
            return describe_adapters(manager, name)
        return describe_model(manager, manager.find(_path_of(request)).status())

    @post("/admin/models/{model_id:path}", status_code=200)
    async def order_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Load or unload a model, or add an adapter. The path is its id, with any slashes, then the operation."""
        name, order = _split(_path_of(request))
        if order == "load":
            await read_empty_body(request.receive, limit)
            return describe_model(manager, await state.exchanges.follow(load_model(manager, name)))
        if order == "adapters":
            added = read_added(await read_body(request.receive, limit))
            return await state.exchanges.follow(add_adapter(state, name, added))
        body = _read_unload_body(await read_body(request.receive, limit))
        unloading = unload_model(manager, name, drain=body.drain, force=body.force, drain_s=body.drain_s)
        return describe_model(manager, await state.exchanges.follow(unloading))

    @delete("/admin/models/{model_id:path}", status_code=200)
    async def remove_model_adapter(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Remove an adapter; the path is the id of its model, ``adapters`` and its name."""
        path, _, adapter = _path_of(request).rpartition("/")
        name, order = _split(path)
        if order != "adapters":
            raise NotFoundException
        return remove_adapter(manager, name, adapter)

    return [list_served_models, show_served_model, order_model, remove_model_adapter]


def describe_model(manager: ModelManager, status: ModelStatus) -> dict[str, Any]:
    """Return the admin API's description of one model."""
    settings = manager.find(status.name).settings
    holds = status.memory_bytes is not None
    return {
        "id": status.name,
        "object": "model",
        "instance": status.instance,
        "aliases": list(status.aliases),
        "state": status.state,
        "progress": status.progress,
        "progress_text": status.progress_text,
        "error": status.error,
        "backend": status.backend,
        "backend_reason": status.reason,
        "load": settings.load,
        "pin": settings.pin,
        "ttl": settings.ttl,
        "draining": settings.draining,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "num_restarts": status.num_restarts,
        "idle_s": None if status.idle_s is None else round(status.idle_s, 3),
        "memory": {"device": status.device, "bytes": status.memory_bytes} if holds else None,
    }


def _describe_memory(manager: ModelManager) -> dict[str, Any]:
    room = manager.room
    return {
        device: {"budget_bytes": room.budget.by_device.get(device), "held_bytes": room.held_bytes(device)}
        for device in room.devices()
    }


def _path_of(request: Request[Any, Any, Any]) -> str:
    return str(request.path_params["model_id"]).removeprefix("/")


def _split(path: str) -> tuple[str, _Order]:
    name, _, order = path.rpartition("/")
    if order not in ("load", "unload", "adapters") or not name:
        raise NotFoundException
    return name, cast(_Order, order)


def _read_unload_body(body: bytes) -> UnloadBody:
    """Decode the body. Raises InvalidRequest if a field is unknown or invalid."""
    data = parse_object(body) if body else {}
    known = {attribute.name for attribute in attrs.fields(UnloadBody)}
    for name in data:
        if name not in known:
            raise InvalidRequest(f"{name}: unknown field; the fields are {', '.join(sorted(known))}", name)
    with converting(refusal_of):
        return strict_converter(whole_floats=True).structure(data, UnloadBody)


_POLL_S = 0.5
"""Seconds between two checks for a server shutdown, which this stream would otherwise delay."""


def event_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""

    @get("/admin/events")
    async def stream_events() -> ASGIApp:
        """Stream model events from now on."""
        return _EventsResponse(state)

    return stream_events


@attrs.frozen(eq=False)
class _EventsResponse:
    """An ASGI response that ends when its client leaves or the server stops."""

    state: ApiState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the server stops."""
        with self.state.manager.events.subscribe() as subscription:
            await send({"type": "http.response.start", "status": 200, "headers": stream_headers(SSE)})
            await send({"type": "http.response.body", "body": SSE.ping, "more_body": True})
            left = asyncio.create_task(_client_left(receive))
            try:
                await self._send_events(subscription, left, send)
            finally:
                left.cancel()
            if not left.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, subscription: Subscription, left: asyncio.Task[None], send: Send) -> None:
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


def reload_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""

    @post("/admin/reload", status_code=200)
    async def reload_configuration(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Serve with the current configuration files; an invalid configuration changes nothing."""
        await read_empty_body(request.receive, state.settings.limits.max_body_bytes)
        report = await state.exchanges.follow(state.reload())
        changes = report.models
        return {
            "generation": report.generation,
            "models": {
                "added": list(changes.added),
                "removed": list(changes.removed),
                "replaced": list(changes.replaced),
                "updated": list(changes.updated),
                "kept": list(changes.kept),
            },
            "needs_restart": list(report.needs_restart),
        }

    return reload_configuration
