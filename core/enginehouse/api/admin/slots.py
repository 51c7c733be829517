"""`GET /admin/slots`: slots, KV cache and prefix cache of each running engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

from attrs import frozen
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.http.callers import caller_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import EngineView, Inspectable, PrefixView
from enginehouse.recovery import Recovery
from enginehouse.serving import LoadedModel, ModelManager

__all__ = ["Engines", "slot_route"]

_PATIENCE_S = 1.0
"""Timeout of a snapshot. An engine takes snapshots between steps, and none during an isolation run; after this time
the model is shown without one.
"""


@frozen(eq=False)
class Engines:
    """The engines of one server."""

    manager: ModelManager
    recovery: Recovery

    def get(self, model: str) -> Engine | None:
        """Return the engine that currently serves ``model``, a model name, or None."""
        loaded = self._loaded(model)
        return loaded.engine if loaded is not None else None

    def _loaded(self, model: str) -> LoadedModel | None:
        try:
            return self.manager.get(model)
        except EnginehouseError:
            return None

    def all(self) -> dict[str, Engine]:
        """Return every engine that is currently serving, by model."""
        return {name: loaded.engine for name, loaded in self._all().items()}

    def _all(self) -> dict[str, LoadedModel]:
        names = [status.name for status in self.manager.statuses() if status.state == "ready"]
        found = {name: self._loaded(name) for name in names}
        return {name: loaded for name, loaded in found.items() if loaded is not None}

    async def views(self, caller: str, wanted: Callable[[str], bool] = lambda model: True) -> dict[str, EngineView]:
        """Return the available snapshots for a caller, by model."""
        models = {name: loaded for name, loaded in self._all().items() if wanted(name)}
        views = await asyncio.gather(*(self._view(loaded, caller) for loaded in models.values()))
        return {name: view for name, view in zip(models, views, strict=True) if view is not None}

    async def _view(self, model: LoadedModel, caller: str) -> EngineView | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.recovery.view(model, caller)
        except (TimeoutError, EnginehouseError):
            return None

    def restarting(self) -> frozenset[str]:
        """Return the models whose worker is restarting."""
        return frozenset(status.name for status in self.manager.statuses() if status.state == "restarting")


def slot_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route."""
    engines, has_keys = Engines(state.manager, state.pipeline.recovery), state.settings.auth.needs_key

    @get("/admin/slots")
    async def show_slots(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show slots, KV positions and prefix-cache entries of every serving model."""
        serving = engines.all()
        views = await engines.views(caller_of(request.scope).name)
        models = []
        for name, engine in serving.items():
            view = views.get(name)
            shown = _UNKNOWN if view is None else _shown(view, has_keys)
            models.append({"model": name, "inspectable": isinstance(engine, Inspectable), **shown})
        return {"object": "list", "data": models}

    return show_slots


_UNKNOWN = dict.fromkeys(
    ("slots", "slots_in_use", "requests_waiting", "cache_tokens", "free_tokens", "sequences", "prefixes")
)
"""Values shown for an engine that is not inspectable, or is busy with a long step."""


def _shown(view: EngineView, has_keys: bool) -> dict[str, Any]:
    sequences = [
        {
            "request_id": request.request_id,
            "choice": sequence.choice,
            "phase": sequence.phase,
            "kv_tokens": sequence.num_kv_tokens,
            "prompt_tokens": request.usage.prompt_tokens,
            "completion_tokens": sequence.num_completion_tokens,
        }
        for request in view.requests
        for sequence in request.sequences
    ]
    in_use = [sequence for sequence in sequences if sequence["phase"] in ("prefill", "decode")]
    waiting = [
        request for request in view.requests if all(sequence.phase == "queued" for sequence in request.sequences)
    ]
    return {
        "slots": view.num_slots,
        "slots_in_use": len(in_use),
        "requests_waiting": len(waiting),
        "cache_tokens": view.num_cache_tokens,
        "free_tokens": view.num_free_tokens,
        "sequences": sequences,
        "prefixes": [_prefix(prefix, has_keys) for prefix in view.prefixes],
    }


def _prefix(prefix: PrefixView, has_keys: bool) -> dict[str, Any]:
    """Describe a prefix. Namespaces of keys are names; salts are written by clients, so only a hash is shown."""
    name, _, salt = prefix.namespace.partition("\0") if has_keys else (None, "", prefix.namespace)
    return {
        "namespace": name,
        "salt_hash": hashlib.sha256(salt.encode("utf-8", "replace")).hexdigest()[:16] if salt else None,
        "tokens": prefix.num_tokens,
        "hits": prefix.num_hits,
    }
