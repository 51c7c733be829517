"""Route permissions: public, or a required scope of the caller's key, and the limits of callers that count a request.

Both are options (``opt``) of Litestar's routers and handlers. A route without the option ``scope`` requires ``admin``,
so a forgotten route is closed, not open. Without keys, anyone who can reach the server may use the models and read
metrics; only requests from its own machine may manage it.
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
    "PUBLIC",
    "check_permissions",
    "may_manage",
    "scope_of",
    "ticket_of",
]

_TICKET_KEY = "enginehouse.ticket"

PUBLIC = frozenset({"/health"})
"""Addresses that need no key, also if they are not found."""


def scope_of(handler: BaseRouteHandler) -> Scope | None:
    """Return the scope that a route requires; None if it is public."""
    return cast(Scope | None, handler.opt.get("scope", "admin"))


_Connection = ASGIConnection[Any, Any, Any, Any]


def check_permissions(admission: Admission) -> Callable[[_Connection, BaseRouteHandler], Awaitable[None]]:
    """Return Litestar's guard of every route; it runs once the route is known and its caller is authenticated.

    It refuses before the body is read. It raises MissingScope if the key lacks the scope, NotLocal if there are no keys
    and the request may come from another machine, RateLimited and ServerOverloaded if limits are used up.
    """

    async def check(connection: _Connection, handler: BaseRouteHandler) -> None:
        record_of(connection.scope).endpoint = connection.scope["path_template"].removeprefix("/v1")
        needed = scope_of(handler)
        key = caller_of(connection.scope).key
        if key is not None and needed is not None and needed not in key.scopes:
            raise MissingScope(needed, sorted(key.scopes))
        if key is None and needed == "admin" and (sign := foreign_sign(connection.scope)) is not None:
            raise NotLocal(sign)
        limits = handler.opt.get("limits")
        if limits is not None:
            ticket = admission.ticket(key, is_generating=limits == "all")
            connection.scope[_TICKET_KEY] = ticket  # type: ignore[literal-required]
            await admission.enter(ticket)

    return check


def may_manage(scope: AsgiScope) -> bool:
    """Return True if the caller of a request may use ``/admin``."""
    key = caller_of(scope).key
    return foreign_sign(scope) is None if key is None else "admin" in key.scopes


def ticket_of(scope: AsgiScope) -> Ticket | None:
    """Return the ticket of a request that counts against limits; None before admission, and for other requests."""
    return cast(Ticket | None, scope.get(_TICKET_KEY))
