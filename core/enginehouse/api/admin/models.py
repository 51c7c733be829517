"""``/admin/models`` and ``/admin/reload``: models, their memory, and changes of them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast, get_args

import attrs
from attrs import field, frozen
from attrs.validators import ge, optional
from litestar import Request, get, post
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.admin.adapters import add_adapter, describe_adapters, read_added
from enginehouse.api.generation.decoding import refusal_of
from enginehouse.api.http.body import parse_object, read_body, read_empty_body
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import InvalidRequest
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.serving.changing import cancel_download, download_model, load_model, unload_model
from enginehouse.settings.structuring import converting, strict_converter

_B = TypeVar("_B", bound=attrs.AttrsInstance)

_Order = Literal["load", "unload", "download", "cancel-download", "adapters"]


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
        unserved = [attrs.asdict(one) for one in manager.settings.presets.unserved]
        return {"object": "list", "data": data, "memory": _describe_memory(manager), "unserved": unserved}

    @get("/admin/models/{model_id:path}")
    async def show_served_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show one model, by its name or an alias, or the adapters of one."""
        name, slash, last = path_of(request).rpartition("/")
        if slash and last == "adapters":
            return describe_adapters(manager, name)
        return describe_model(manager, manager.find(path_of(request)).status())

    @post("/admin/models/{model_id:path}", status_code=200)
    async def order_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Load, unload or download a model. The path is its id, which may contain slashes, and the operation."""
        name, order = _split(path_of(request))
        if order == "load":
            await read_empty_body(request.receive, limit)
            return describe_model(manager, await state.exchanges.follow(load_model(manager, name)))
        if order == "download":
            await read_empty_body(request.receive, limit)
            return describe_model(manager, await state.exchanges.follow(download_model(manager, name)))
        if order == "cancel-download":
            await read_empty_body(request.receive, limit)
            return describe_model(manager, cancel_download(manager, name))
        if order == "adapters":
            added = read_added(await read_body(request.receive, limit))
            return await state.exchanges.follow(add_adapter(state, name, added))
        body = read_fields(await read_body(request.receive, limit), UnloadBody)
        unloading = unload_model(manager, name, drain=body.drain, force=body.force, drain_s=body.drain_s)
        return describe_model(manager, await state.exchanges.follow(unloading))

    return [list_served_models, show_served_model, order_model]


def describe_model(manager: ModelManager, status: ModelStatus) -> dict[str, Any]:
    """Return the admin API's description of one model."""
    model = manager.find(status.name)
    settings = model.settings
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
        "downloading": manager.is_downloading(model),
        "origin": settings.origin,
        "source": settings.source,
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
        "replicas": _describe_replicas(status),
    }


def _describe_replicas(status: ModelStatus) -> list[dict[str, Any]] | None:
    if status.replicas is None:
        return None
    return [{"name": place, "num_requests": count} for place, count in sorted(status.replicas.items())]


def _describe_memory(manager: ModelManager) -> dict[str, Any]:
    room = manager.room
    return {
        device: {"budget_bytes": room.budget.by_device.get(device), "held_bytes": room.held_bytes(device)}
        for device in room.devices()
    }


def path_of(request: Request[Any, Any, Any]) -> str:
    """Return the rest of the path of a request about a model."""
    return str(request.path_params["model_id"]).removeprefix("/")


def _split(path: str) -> tuple[str, _Order]:
    name, _, order = path.rpartition("/")
    if order not in get_args(_Order) or not name:
        raise NotFoundException
    return name, cast(_Order, order)


def read_fields(body: bytes, kind: type[_B]) -> _B:
    """Decode the body. Raises InvalidRequest if a field is unknown or invalid."""
    data = parse_object(body) if body else {}
    known = {attribute.name for attribute in attrs.fields(kind)}
    for name in data:
        if name not in known:
            raise InvalidRequest(f"{name}: unknown field; the fields are {', '.join(sorted(known))}", name)
    with converting(refusal_of):
        return strict_converter(whole_floats=True).structure(data, kind)


def reload_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""

    @post("/admin/reload", status_code=200)
    async def reload_configuration(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Serve with the current configuration files; an invalid configuration changes nothing."""
        await read_empty_body(request.receive, state.settings.limits.max_body_bytes)
        report = await state.exchanges.follow(state.reload())
        changes = report.models
        return {
            "snapshot": report.snapshot,
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
