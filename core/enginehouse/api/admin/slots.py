"""``GET /admin/slots``: who holds the slots and the KV cache of each model, and what the prefix cache keeps."""

from __future__ import annotations

import hashlib
from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.admin.engine_views import Engines
from enginehouse.api.http.caller import caller_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.inspection import EngineView, Inspectable, PrefixView

__all__ = ["slot_route"]


def slot_route(state: ApiState) -> HTTPRouteHandler:
    """The route."""
    engines, has_keys = Engines(state.manager, state.pipeline.replays), state.settings.auth.needs_key

    @get("/admin/slots")
    async def show_slots(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show slots, KV positions and prefix-cache entries of every model that serves now."""
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
"""Of an engine that shows nothing, or is busy with a long step."""


def _shown(view: EngineView, has_keys: bool) -> dict[str, Any]:
    sequences = [
        {
            "request_id": request.request_id,
            "choice": sequence.choice,
            "phase": sequence.phase,
            "kv_tokens": sequence.num_kv_tokens,
            "prompt_tokens": request.num_prompt_tokens,
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
    """Namespaces of keys are names; salts are what clients write, so only a hash is shown."""
    name, _, salt = prefix.namespace.partition("\0") if has_keys else (None, "", prefix.namespace)
    return {
        "namespace": name,
        "salt_hash": hashlib.sha256(salt.encode("utf-8", "replace")).hexdigest()[:16] if salt else None,
        "tokens": prefix.num_tokens,
        "hits": prefix.num_hits,
    }
