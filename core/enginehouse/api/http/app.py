"""The ASGI application: all routes, and the guard in front of them. It answers ``GET /health`` itself.

Path of a request through the modules: ``security`` (Host, Origin, key), this module (routing), ``callers`` (scope,
limits), ``surfaces`` (decoding), then in ``generation``: ``response`` (submission), ``assembly`` and ``stream``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from litestar import Litestar, Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.types import Receive, Scope, Send

from enginehouse.api.admin.adapters import vllm_adapter_routes
from enginehouse.api.admin.events import event_route
from enginehouse.api.admin.models import adding_routes, admin_model_routes, reload_route
from enginehouse.api.admin.requests import request_routes, slot_route
from enginehouse.api.http.access import AccessRecord, record_of
from enginehouse.api.http.callers import Callers, caller_of, check_permissions, may_manage, shown_as
from enginehouse.api.http.errors import describe
from enginehouse.api.http.frames import send_body
from enginehouse.api.http.listeners import request_ended
from enginehouse.api.http.pages import Pages
from enginehouse.api.http.security import HttpGuard, note_outcome, written_error
from enginehouse.api.http.state import ApiState
from enginehouse.api.http.surfaces import ScopedRouter, Surfaces
from enginehouse.api.metrics import metrics_route
from enginehouse.api.openai.surface import openai_surface
from enginehouse.api.openapi.document import schema_route
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.serving import ModelStatus


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


def build_app(state: ApiState) -> HttpGuard:
    """Return the ASGI application of one server.

    Raises:
        ConfigError: the settings name an authenticator or a surface that does not exist, or two surfaces collide.
    """
    registry = state.registry
    known = [openai_surface(state), *registry.surfaces.values()]
    surfaces = Surfaces(known, state.settings.server.surfaces, registry.absences)
    litestar = Litestar(
        route_handlers=[
            *surfaces.routers(state),
            ScopedRouter(None, [health_route(state)]),
            ScopedRouter("infer", [schema_route(state, surfaces.routes)]),
            ScopedRouter("metrics", [metrics_route(state.metrics)]),
            *admin_model_routes(state),
            *adding_routes(state),
            *vllm_adapter_routes(state),
            event_route(state),
            reload_route(state),
            *request_routes(state),
            slot_route(state),
        ],
        before_request=check_permissions(state.admission),
        # One handler instead of one per type: the table in ``errors`` has the status, code and body of every error.
        exception_handlers={Exception: _answer_error},
        openapi_config=None,  # see api/openapi/document.py
        logging_config=None,  # the command line configures logging, for workers as well
    )
    state.registry.check_authenticators(state.settings.auth.authenticators)
    authenticators = [state.registry.authenticators[name] for name in state.settings.auth.authenticators]
    pages = Pages(registry.pages.values(), state.settings.server)
    callers = Callers(state.keys, authenticators, state.settings.auth.timeout_s)
    return HttpGuard(
        litestar,
        state.settings,
        callers,
        state.admission,
        find_surface=surfaces.at,
        has_head=surfaces.has_head,
        pages=pages,
        on_end=_on_end(state),
    )


def _on_end(state: ApiState) -> Callable[[AccessRecord], None]:
    """Return the callback that receives every request's record when its response has ended."""

    def count_and_tell(record: AccessRecord) -> None:
        state.metrics.on_request_end(record, by_key=state.settings.server.key_metrics)
        state.exchanges.events.end(record)
        if state.listeners:
            state.listeners.publish(request_ended(record))

    return count_and_tell


class _ErrorResponse(Response[bytes]):
    """A response whose body is that of the surface of its address, which may take time to write it."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(b"", status_code=answer.status)
        self._answer = answer

    def to_asgi_response(self, app: Any, request: Any, **more: Any) -> Any:
        """Return the ASGI application that writes the response."""

        async def send_error(scope: Scope, receive: Receive, send: Send) -> None:
            status, headers, body = await written_error(self._answer, scope)
            await send_body(send, body, headers, status)

        return send_error


def _answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Return the JSON response for an exception raised before the first byte was sent."""
    concerns_manager = isinstance(error, ModelLoadError) or request.scope["path"].startswith("/admin/")
    shows_details = concerns_manager and may_manage(request.scope)
    answer = describe(error, record_of(request.scope).identify(), shows_details=shows_details)
    note_outcome(request.scope, answer.code)
    return _ErrorResponse(answer)
