"""The application: every route, and the guard in front of them.

Reading order of a request: ``security`` (may it come in), this module (which route), ``chat`` or
``completions`` (decode; wire format), ``generation`` (submit, then answer), ``answer`` (assembly), ``sse``.
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, Response
from litestar.types import ASGIApp

from enginehouse.api.chat import chat_route
from enginehouse.api.completions import completion_route
from enginehouse.api.errors import describe
from enginehouse.api.health import health_route
from enginehouse.api.models import model_routes
from enginehouse.api.security import Guard, note_outcome
from enginehouse.api.state import ApiState

__all__ = ["build_app"]


def build_app(state: ApiState) -> ASGIApp:
    """The ASGI application of one server."""
    litestar = Litestar(
        route_handlers=[chat_route(state), completion_route(state), *model_routes(state), health_route(state)],
        exception_handlers={Exception: _answer_error},
        openapi_config=None,
        logging_config=None,
    )
    return Guard(litestar, state.settings)


def _answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Whatever was raised before the first byte, as JSON."""
    answer = describe(error)
    note_outcome(request.scope, answer.code)
    headers = dict(answer.headers)
    return Response(answer.body(), status_code=answer.status, media_type="application/json", headers=headers)
