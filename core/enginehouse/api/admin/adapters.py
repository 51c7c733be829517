"""Adapters at run time: ``/admin/models/{id}/adapters``, and vLLM's two addresses for the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import attrs
from attrs import field, frozen
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.generation.decoding import refusal_of
from enginehouse.api.http.body import parse_object, read_body
from enginehouse.api.http.state import ApiState
from enginehouse.contract.adapters import Adapter
from enginehouse.contract.errors import (
    AdapterRefused,
    EngineError,
    InvalidRequest,
    ModelConflict,
    RequestError,
    UnsupportedParameter,
    quoted,
)
from enginehouse.serving.adapters import plan_adapter
from enginehouse.serving.manager import ModelManager
from enginehouse.settings.adapters import check_adapter_name, check_scale
from enginehouse.settings.structuring import converting, strict_converter
from enginehouse.workers.client import WorkerEngine

__all__ = ["AddAdapterBody", "add_adapter", "describe_adapters", "read_added", "remove_adapter", "vllm_adapter_routes"]

_T = TypeVar("_T")


@frozen(kw_only=True)
class AddAdapterBody:
    """The body of ``POST /admin/models/{id}/adapters``.

    Attributes:
        source: path below one of the model's ``adapter_folders``, or the id of a downloaded repository.
        scale: strength of the adapter where a request gives none.
    """

    name: str
    source: str
    scale: float = field(default=1.0, validator=check_scale)


def read_added(body: bytes) -> AddAdapterBody:
    """Decode the body. Raises InvalidRequest if a field is unknown or invalid."""
    return _structure(body, AddAdapterBody)


def _structure(body: bytes, kind: type[_T]) -> _T:
    data = parse_object(body)
    known = {attribute.name for attribute in attrs.fields(cast("Any", kind))}
    for name in data:
        if name not in known:
            raise InvalidRequest(f"{name}: unknown field; the fields are {', '.join(sorted(known))}", name)
    with converting(refusal_of):
        return strict_converter(whole_floats=True).structure(data, kind)


def describe_adapters(manager: ModelManager, model: str) -> dict[str, Any]:
    """Return the adapters of a model, in the order of llama-server's ids."""
    served = manager.find(model)
    table = served.adapters
    data = [
        {
            "id": table.places.index(name),
            "name": name,
            "model": f"{served.name}:{name}",
            "scale": adapter.scale,
            "digest": adapter.digest or None,
            "origin": "request" if name in table.added else "settings",
        }
        for name, adapter in table.all().items()
    ]
    return {"object": "list", "data": data, "max_adapters": served.settings.max_adapters}


async def add_adapter(state: ApiState, model: str, body: AddAdapterBody) -> dict[str, Any]:
    """Load an adapter and offer it to requests; return the adapters of the model.

    Raises:
        InvalidRequest: the name cannot be used.
        ModelConflict: the model has an adapter of that name, or a model has the name that it would get.
        AdapterRefused: its source is not allowed, or its files are damaged or do not fit.
        UnsupportedParameter: the model takes no adapters.
    """
    manager = state.manager
    served = manager.find(model)
    try:
        check_adapter_name(body.name)
    except ValueError as error:
        raise InvalidRequest(f"name: {error}", "name") from error
    if body.name in served.adapters.names:
        raise ModelConflict(f"The model {served.name!r} has an adapter {quoted(body.name)}; remove it first.")
    adapter = await plan_adapter(body.name, body.source, body.scale, served.settings.adapter_folders, state.registry)
    async with manager.use(served.name) as loaded:
        if loaded.info.engine.adapters == "none" or not isinstance(loaded.engine, WorkerEngine):
            raise UnsupportedParameter("model: this model takes no adapters at run time", "model")
        try:
            await loaded.engine.change_adapter(adapter)
        except AdapterRefused as error:  # a request would name it in its own field
            error.param = "source"
            raise
    if body.name in served.adapters.names:
        raise ModelConflict(f"The model {served.name!r} has got an adapter {quoted(body.name)} meanwhile.")
    served.adapters.add(adapter)
    return describe_adapters(manager, served.name)


async def remove_adapter(manager: ModelManager, model: str, name: str) -> dict[str, Any]:
    """Offer an adapter no longer; running requests keep it. Raises AdapterNotFound."""
    served = manager.find(model)
    adapter = served.adapters.remove(served.name, name)
    if adapter is not None and not _is_offered(adapter, served.adapters.all().values()):
        engine = served.loaded.engine if served.loaded is not None else None
        if isinstance(engine, WorkerEngine):
            with contextlib.suppress(EngineError):  # a worker that has died has no adapters
                await engine.change_adapter(adapter, removes=True)
    return describe_adapters(manager, served.name)


def _is_offered(adapter: Adapter, others: Any) -> bool:
    """Return True if another name has the same files."""
    return any(other.digest == adapter.digest for other in others)


@frozen(kw_only=True)
class _VllmLoad:
    """vLLM's body; ``lora_int_id`` has no meaning here."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    lora_int_id: int | None = None
    load_inplace: bool = False


@frozen(kw_only=True)
class _VllmUnload:
    lora_name: str
    base_model_name: str | None = None
    lora_int_id: int | None = None


_VLLM_NAMES = {"model": "base_model_name", "name": "lora_name", "source": "lora_path"}


@contextlib.contextmanager
def _naming_vllms_fields() -> Iterator[None]:
    """Let errors name the fields of vLLM's bodies."""
    try:
        yield
    except RequestError as error:
        if error.param in _VLLM_NAMES:
            known, error.param = error.param, _VLLM_NAMES[error.param]
            if error.message.startswith(f"{known}: "):
                error.message = error.message.replace(known, error.param, 1)
        raise


def vllm_adapter_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """Return the routes; they need the scope ``admin``."""
    limit = state.settings.limits.max_body_bytes

    @post("/v1/load_lora_adapter", status_code=200, media_type="text/plain")
    async def load_lora_adapter(request: Request[Any, Any, Any]) -> str:
        """Add an adapter, as vLLM does; ``base_model_name`` is the model, else the first one."""
        asked = _structure(await read_body(request.receive, limit), _VllmLoad)
        if asked.load_inplace:
            raise UnsupportedParameter("load_inplace: not supported; unload the adapter first", "load_inplace")
        body = AddAdapterBody(name=asked.lora_name, source=asked.lora_path)
        with _naming_vllms_fields():
            await state.exchanges.follow(add_adapter(state, state.manager.find(asked.base_model_name).name, body))
        return f"Success: LoRA adapter '{asked.lora_name}' added successfully."

    @post("/v1/unload_lora_adapter", status_code=200, media_type="text/plain")
    async def unload_lora_adapter(request: Request[Any, Any, Any]) -> str:
        """Remove an adapter, as vLLM does."""
        asked = _structure(await read_body(request.receive, limit), _VllmUnload)
        with _naming_vllms_fields():
            await remove_adapter(state.manager, state.manager.find(asked.base_model_name).name, asked.lora_name)
        return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."

    return [load_lora_adapter, unload_lora_adapter]
