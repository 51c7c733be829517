"""``POST /admin/reload``: read the configuration again."""

from __future__ import annotations

from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.http.body import read_empty_body
from enginehouse.api.http.state import ApiState

__all__ = ["reload_route"]


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
