"""``POST /admin/models`` and ``DELETE /admin/models/{id}``: models that administrators add and remove."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import frozen
from litestar import Request, delete, post
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.admin.adapters import remove_adapter
from enginehouse.api.admin.models import describe_model, path_of, read_fields
from enginehouse.api.http.body import read_body
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import ConfigError, InvalidRequest, SourceNotFound, quoted
from enginehouse.serving.adding import allowed_source, check_name, name_of
from enginehouse.settings.config import ModelSettings, Settings, new_model


@frozen(kw_only=True)
class AddBody:
    """The body of ``POST /admin/models``. Its fields are the settings of a model that a request may set.

    Attributes:
        source: a path in ``server.models_dir``, or an id that ``server.allowed_sources`` allows.
        id: the name; unset is the source's own.
        download: add the model also if its files have to be downloaded from the hub, and begin with that.
    """

    source: str
    id: str | None = None
    download: bool = False
    aliases: tuple[str, ...] = ()
    context: int | None = None
    slots: int | None = None
    load: Literal["eager", "lazy"] = "lazy"
    pin: bool | None = None
    ttl: float | None = None
    draining: Literal["wait", "serve"] | None = None
    defaults: dict[str, Any] | None = None

    def table(self, source: str) -> dict[str, Any]:
        """Return the given settings as a table of the configuration."""
        given = {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}
        for name in ("id", "download"):
            given.pop(name, None)
        return {**given, "source": source, "aliases": list(self.aliases)}


def adding_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """Return the routes."""
    manager, limit = state.manager, state.settings.limits.max_body_bytes

    @post("/admin/models", status_code=201)
    async def add_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Serve a further model, until the server stops or it is removed."""
        body = read_fields(await read_body(request.receive, limit), AddBody)
        name = body.id if body.id is not None else name_of(body.source)

        def wanted(settings: Settings) -> tuple[str, ModelSettings]:
            source = allowed_source(body.source, settings, state.registry)
            model = new_model(settings, name, body.table(source))
            check_name(name, model)
            return name, model

        try:
            is_here = await state.exchanges.follow(state.add_model(wanted, download=body.download))
        except ConfigError as error:
            raise _invalid(error, name) from error
        if not is_here and not body.download:
            raise SourceNotFound(
                f'source: the files of {quoted(body.source)} are not here; ask with "download": true', "source"
            )
        return describe_model(manager, manager.find(name).status())

    @delete("/admin/models/{model_id:path}", status_code=200)
    async def remove_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Stop serving a model that was added, or an adapter; files stay. An adapter follows ``/adapters/``."""
        model, marker, adapter = path_of(request).rpartition("/adapters/")
        if marker:
            return await remove_adapter(manager, model, adapter)
        name = manager.find(path_of(request)).name
        await state.exchanges.follow(state.remove_model(name))
        return {"id": name, "object": "model", "deleted": True}

    return [add_model, remove_model]


def _invalid(error: ConfigError, name: str) -> InvalidRequest:
    """Return the refusal for invalid settings of a model, whose paths begin with ``models.<name>``."""
    prefix = f"models.{name}."
    message = error.message.removeprefix(prefix)
    param = (error.path or "").removeprefix(prefix) or None
    return InvalidRequest(message, param)
