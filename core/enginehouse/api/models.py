"""``GET /v1/models`` and ``GET /v1/models/{id}``: what is served, loading and failed models included."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.state import ApiState
from enginehouse.errors import ModelNotFound
from enginehouse.models import ModelStatus

__all__ = ["model_routes"]


def model_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """The routes."""

    @get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List all models."""
        return {"object": "list", "data": [_model(status) for status in state.manager.statuses()]}

    @get("/v1/models/{model_id:path}")
    async def show_model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show one model, by its name or an alias; names may hold slashes."""
        name = str(request.path_params["model_id"]).removeprefix("/")
        for status in state.manager.statuses():
            if name == status.name or name in status.aliases:
                return _model(status)
        raise ModelNotFound(name)

    return [list_models, show_model]


def _model(status: ModelStatus) -> dict[str, Any]:
    """OpenAI's model object; what follows ``owned_by`` is ours."""
    info = status.info
    return {
        "id": status.name,
        "object": "model",
        "created": status.created,
        "owned_by": "enginehouse",
        "aliases": list(status.aliases),
        "state": status.state,
        "progress": status.progress,
        "error": status.error,
        "backend": status.backend,
        "max_context": info.max_context if info else None,
        "num_restarts": status.num_restarts,
    }
