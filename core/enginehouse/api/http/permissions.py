"""What each address asks of its callers: nothing, or a scope of their key. The one list of both.

An address that is not listed needs the scope ``admin``, so a route that somebody forgets here is shut, not open.
Without keys everyone who reaches the server may use the models and read figures; only its own machine may manage it.
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
"""Addresses that need no key."""

API_PREFIXES = ("/v1", "")
"""Where the API is mounted: every address of it exists with and without ``/v1``."""

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
"""Address of a route, with the names of its parameters, to the scope that it needs."""

METERED = frozenset(f"{prefix}{path}" for prefix in API_PREFIXES for path in ("/chat/completions", "/completions"))
"""Addresses whose requests count against all limits of callers."""

COUNTED = METERED | {
    f"{prefix}{path}" for prefix in API_PREFIXES for path in ("/tokenize", "/detokenize", "/apply-template", "/route")
}
"""Addresses whose requests are work, and so count among those that a caller may have running at once."""


def scope_of(template: str) -> Scope | None:
    """The scope that an address needs; None when it is public."""
    return None if template in PUBLIC else SCOPES.get(template, "admin")


_Connection = ASGIConnection[Any, Any, Any, Any]


def open_doors(admission: Admission) -> Callable[[_Connection, BaseRouteHandler], Awaitable[None]]:
    """Litestar's guard of every route; runs when the route is known and its caller has been let in.

    What it refuses is refused before the body is read. It raises MissingScope when the key may not do this, NotLocal
    where there are no keys and the caller is elsewhere, RateLimited and ServerOverloaded when limits are used up.
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
    """Whether ``/admin`` is open to the caller of a request."""
    key = caller_of(scope).key
    return foreign_sign(scope) is None if key is None else "admin" in key.scopes


def ticket_of(scope: AsgiScope) -> Ticket | None:
    """The ticket of a request that counts against limits; None before it wanted to be let in, and of others."""
    return cast(Ticket | None, scope.get(_TICKET_KEY))
