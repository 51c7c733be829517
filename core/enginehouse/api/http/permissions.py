"""Route permissions: public, or a required scope of the caller's key. The only list of both.

A route that is not listed requires the scope ``admin``, so a forgotten route is closed, not open. Without keys, anyone
who can reach the server may use the models and read metrics; only requests from its own machine may manage it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope as AsgiScope

from enginehouse.api.http.access import record_of
from enginehouse.api.http.admission import Admission, Ticket
from enginehouse.api.http.callers import caller_of
from enginehouse.api.http.errors import MissingScope, NotLocal
from enginehouse.api.http.own_machine import foreign_sign
from enginehouse.contract.identity import Scope

__all__ = [
    "API_PREFIXES",
    "COUNTED",
    "METERED",
    "PUBLIC",
    "SCOPES",
    "may_manage",
    "open_doors",
    "scope_of",
    "ticket_of",
]

_TICKET_KEY = "enginehouse.ticket"

PUBLIC = frozenset({"/health"})
"""Routes that need no key."""

API_PREFIXES = ("/v1", "")
"""Mount prefixes of the API: each of its routes exists with and without ``/v1``."""

_API: dict[str, Scope] = {
    "/chat/completions": "infer",
    "/completions": "infer",
    "/route": "infer",
    "/models": "infer",
    "/models/{model_id}": "infer",
    "/tokenize": "infer",
    "/detokenize": "infer",
    "/apply-template": "infer",
}

SCOPES: dict[str, Scope] = {
    **{f"{prefix}{path}": scope for prefix in API_PREFIXES for path, scope in _API.items()},
    "/schema": "infer",
    "/schema/openapi.json": "infer",
    "/metrics": "metrics",
    "/admin/events": "admin",
    "/admin/models": "admin",
    "/admin/models/{model_id}": "admin",
    "/admin/reload": "admin",
    "/admin/requests": "admin",
    "/admin/requests/{request_id}": "admin",
    "/admin/requests/{request_id}/partial": "admin",
    "/admin/requests/{request_id}/cancel": "admin",
    "/admin/requests/{request_id}/stop-thinking": "admin",
    "/admin/slots": "admin",
}
"""Route, with the names of its path parameters, to the required scope."""

METERED = frozenset(f"{prefix}{path}" for prefix in API_PREFIXES for path in ("/chat/completions", "/completions"))
"""Routes whose requests count against all limits of callers."""

COUNTED = METERED | {
    f"{prefix}{path}" for prefix in API_PREFIXES for path in ("/tokenize", "/detokenize", "/apply-template", "/route")
}
"""Routes whose requests count against the concurrency limit."""


def scope_of(template: str) -> Scope | None:
    """Return the scope that a route requires; None if it is public."""
    return None if template in PUBLIC else SCOPES.get(template, "admin")


_Connection = ASGIConnection[Any, Any, Any, Any]


def open_doors(admission: Admission) -> Callable[[_Connection, BaseRouteHandler], Awaitable[None]]:
    """Return Litestar's guard of every route; it runs once the route is known and its caller is authenticated.

    It refuses before the body is read. It raises MissingScope if the key lacks the scope, NotLocal if there are no keys
    and the request may come from another machine, RateLimited and ServerOverloaded if limits are used up.
    """

    async def open_door(connection: _Connection, _: BaseRouteHandler) -> None:
        template = connection.scope["path_template"]
        record_of(connection.scope).endpoint = template.removeprefix("/v1")
        needed = scope_of(template)
        key = caller_of(connection.scope).key
        if key is not None and needed is not None and needed not in key.scopes:
            raise MissingScope(needed, sorted(key.scopes))
        if key is None and needed == "admin" and (sign := foreign_sign(connection.scope)) is not None:
            raise NotLocal(sign)
        if template in COUNTED and connection.scope.get("method") == "POST":
            ticket = admission.ticket(key, is_generating=template in METERED)
            connection.scope[_TICKET_KEY] = ticket  # type: ignore[literal-required]
            await admission.enter(ticket)

    return open_door


def may_manage(scope: AsgiScope) -> bool:
    """Return True if the caller of a request may use ``/admin``."""
    key = caller_of(scope).key
    return foreign_sign(scope) is None if key is None else "admin" in key.scopes


def ticket_of(scope: AsgiScope) -> Ticket | None:
    """Return the ticket of a request that counts against limits; None before admission, and for other requests."""
    return cast(Ticket | None, scope.get(_TICKET_KEY))
