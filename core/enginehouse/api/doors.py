"""What each address asks of its callers: nothing, or a scope of their key. The one list of both.

An address that is not listed needs the scope ``admin``, so a route that somebody forgets here is shut, not open. Only
servers with keys ask; without keys everyone who may reach the server may do everything.
"""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from enginehouse.api.access import record_of
from enginehouse.api.caller import caller_of
from enginehouse.api.errors import MissingScope
from enginehouse.identity import Scope

__all__ = ["API_PREFIXES", "PUBLIC", "SCOPES", "check_scope", "scope_of"]

PUBLIC = frozenset({"/health"})
"""Addresses that need no key."""

API_PREFIXES = ("/v1", "")
"""Where the API is mounted: every address of it exists with and without ``/v1``."""

_API: dict[str, Scope] = {
    "/chat/completions": "infer",
    "/completions": "infer",
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
    "/admin/requests": "admin",
    "/admin/requests/{request_id}": "admin",
    "/admin/requests/{request_id}/partial": "admin",
    "/admin/requests/{request_id}/cancel": "admin",
    "/admin/requests/{request_id}/stop-thinking": "admin",
    "/admin/slots": "admin",
}
"""Address of a route, with the names of its parameters, to the scope that it needs."""


def scope_of(template: str) -> Scope | None:
    """The scope that an address needs; None when it is public."""
    return None if template in PUBLIC else SCOPES.get(template, "admin")


async def check_scope(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Litestar's guard of every route; runs when the route is known and its caller has been let in.

    Raises:
        MissingScope: the key may not do this.
    """
    template = connection.scope["path_template"]
    record_of(connection.scope).endpoint = template.removeprefix("/v1")
    needed = scope_of(template)
    key = caller_of(connection.scope).key
    if key is not None and needed is not None and needed not in key.scopes:
        raise MissingScope(needed, sorted(key.scopes))
