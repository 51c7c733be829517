"""``GET /health``: whether requests can be served now. Public, so it shows states only, not reasons.

Models are listed only for callers that may use them: on a server with keys, not for callers without a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.http.callers import caller_of, shown_as
from enginehouse.api.http.state import ApiState
from enginehouse.serving import ModelStatus

__all__ = ["health_route"]


def health_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route.

    The status is 200 if every model that the server loads at startup is available or was deferred, and at least one can
    serve requests (``ok``, or ``degraded`` if another one failed); 503 while one of these loads or restarts, if none
    could be loaded, and during shutdown. Models that are loaded on request or evicted for another one do not affect it.
    """

    @get("/health")
    async def check_health(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
        """Report whether requests can be served now."""
        statuses = state.manager.statuses()
        word = "stopping" if state.exchanges.stopping else _word(statuses)
        caller = caller_of(request.scope)
        shown = () if state.keys.needs_key and caller.key is None else statuses
        models = {
            status.name: {"state": status.state, "progress": status.progress}
            for status in shown
            if shown_as(caller, status)
        }
        status_code = 200 if word in ("ok", "degraded") else 503
        headers = {"retry-after": "1"} if status_code == 503 else {}
        return Response({"status": word, "models": models}, status_code=status_code, headers=headers)

    return check_health


def _word(statuses: Sequence[ModelStatus]) -> str:
    states = {"ready" if _can_be_asked(status) else status.state for status in statuses}
    for state in ("loading", "restarting"):
        if state in states:
            return state
    if "ready" not in states:
        return "failed"
    return "degraded" if "failed" in states else "ok"


def _can_be_asked(status: ModelStatus) -> bool:
    """Return True if a request for the model would be served, possibly after loading it on demand."""
    return status.state in ("ready", "draining", "unloaded") or (status.state == "loading" and status.on_demand)
