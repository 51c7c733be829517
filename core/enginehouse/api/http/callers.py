"""Callers: authentication by API key or plugin, the API profile in use, and permissions for routes and models.

The required scope and the limits that count a request are options (``opt``) of Litestar's routers and handlers. A route
without the option ``scope`` requires ``admin``, so a forgotten route is closed, not open. Without keys, anyone who can
reach the server may use the models and read metrics; only requests from its own machine may manage it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from attrs import frozen
from litestar import Request
from litestar.handlers import BaseRouteHandler
from litestar.types import HTTPScope
from litestar.types import Scope as AsgiScope

from enginehouse.api.http.access import record_of
from enginehouse.api.http.admission import Admission, Ticket
from enginehouse.api.http.errors import AuthenticatorFailed, MissingScope, NotLocal
from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.origins import Headers, foreign_sign
from enginehouse.contract.errors import InvalidRequest, ModelNotFound, PluginFailed
from enginehouse.contract.identity import Credentials, Identity, Scope
from enginehouse.plugins.guarded import Authenticator
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.settings.config import ServerSettings, matches
from enginehouse.settings.profiles import PROFILES, Profile

CALLER_KEY = "enginehouse.caller"
"""Key of a request's caller in its ASGI scope."""

_COMPAT = "/compat/"


@frozen(kw_only=True)
class Caller:
    """The sender of a request.

    Attributes:
        profile: the API that the response is written in.
        key: identity from its key or a plugin; None on a server without keys, and on public routes.
        named_profile: the profile named in the path, if any.
        is_local: True if, on a server without keys, the caller may manage it.
    """

    profile: Profile
    key: Identity | None = None
    named_profile: Profile | None = None
    is_local: bool = False

    @property
    def name(self) -> str:
        """Name that identifies the caller in queues; empty for all callers of a server without keys."""
        return "" if self.key is None else self.key.name

    @property
    def key_namespace(self) -> str:
        """Namespace that the caller shares with other keys, or its own; empty on a server without keys."""
        return "" if self.key is None else self.key.namespace or self.key.name

    @property
    def scopes(self) -> frozenset[Scope]:
        """The caller's permissions."""
        if self.key is not None:
            return self.key.scopes
        return frozenset({"infer", "metrics", "admin"} if self.is_local else {"infer", "metrics"})

    @property
    def allowed_models(self) -> frozenset[str] | None:
        """Names of the models that it may use; None means all."""
        return None if self.key is None or self.key.models is None else frozenset(self.key.models)

    def namespace(self, own: str) -> str:
        """Return the request's prefix-cache namespace, private to the caller unless keys share a namespace.

        Args:
            own: namespace within the caller's, chosen by the request.
        """
        # The first NUL ends the key's part, which contains none, so no two callers produce the same text.
        return own if self.key is None else f"{self.key_namespace}\0{own}"


def caller_of(scope: AsgiScope) -> Caller:
    """Return the caller of a request that the guard admitted."""
    return cast(Caller, scope[CALLER_KEY])  # type: ignore[literal-required]


def split_compat(path: str) -> tuple[Profile | None, str]:
    """Split a path into the profile that it names and the path without it.

    ``/compat/octomil/v1/models`` is ``/v1/models`` in the profile octomil. Other paths, including those of unknown
    profiles, are returned unchanged.
    """
    if path.startswith(_COMPAT):
        name, slash, rest = path.removeprefix(_COMPAT).partition("/")
        if name in PROFILES and slash and rest.startswith("v1/"):
            return PROFILES[name], f"/{rest}"
    return None, path


def may_use(caller: Caller, name: str, asked: str | None = None) -> bool:
    """Return True if a caller may use the model ``name`` when it requests it as ``asked``.

    A list that contains a model's name allows its aliases as well; one that contains an alias allows that alias only.
    """
    allowed = caller.key.models if caller.key is not None else None
    if allowed is None or name in allowed or asked in allowed:
        return True
    return asked is not None and any(matches(alias, asked) for alias in allowed)


def check_model(caller: Caller, asked: str | None, manager: ModelManager) -> None:
    """Refuse a model that the caller may not use, before anything is loaded for it.

    Raises:
        ModelNotFound: this caller may not use such a model.
    """
    if caller.key is not None and caller.key.models is not None:
        model = manager.find(asked)
        if not may_use(caller, model.name, asked):
            raise ModelNotFound(asked or model.name)


def shown_as(caller: Caller, status: ModelStatus) -> list[str]:
    """Return the names by which a caller may request a model, the listed one first; empty if it may not use it."""
    return [name for name in (status.name, *status.aliases) if may_use(caller, status.name, name)]


def may_see_prompts(caller: Caller, server: ServerSettings, *, is_local: bool) -> bool:
    """Return True if the operator allows showing text of other requests and the caller may use ``/admin``."""
    return server.show_prompts and (is_local if caller.key is None else "admin" in caller.key.scopes)


def check_priority(caller: Caller, priority: int) -> None:
    """Refuse a priority that is more urgent than the caller's key allows.

    Raises:
        InvalidRequest: names the field.
    """
    if caller.key is not None and priority < caller.key.priority:
        message = f"priority: this key may ask for {caller.key.priority} or more, not {priority}"
        raise InvalidRequest(message, "priority")


class ExpiredKey(Exception):
    """The key is known but has expired."""


class Callers:
    """Authenticates callers.

    Args:
        keys: keys from the settings and the key file.
        authenticators: tried in this order for callers without such a key.
        timeout_s: maximum time for each of them.
    """

    def __init__(self, keys: KeyStore, authenticators: Sequence[Authenticator], timeout_s: float) -> None:
        self._keys = keys
        self._timeout_s = timeout_s
        self._authenticators = authenticators

    @property
    def are_checked(self) -> bool:
        """True if only authenticated callers are served."""
        return self._keys.needs_key

    def by_key(self, headers: Headers) -> Identity | None:
        """Return the identity of the request's API key; None if the key is unknown or none is required.

        Raises:
            ExpiredKey: the key is known but has expired.
        """
        ring = self._keys.ring
        if not self.are_checked or ring.is_empty:
            return None
        found = ring.find(_token(headers))
        if found is not None and found.is_expired(datetime.now(UTC)):
            raise ExpiredKey
        return found

    async def by_plugin(self, scope: HTTPScope, headers: Headers) -> Identity | None:
        """Return the identity that a plugin recognises; None if no plugin does.

        Raises:
            AuthenticatorFailed: a plugin failed, so that it is unknown whether it would have recognised the caller.
        """
        if not self._authenticators:
            return None
        client = scope.get("client")
        credentials = Credentials(
            token=_token(headers).decode("latin-1"),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()},
            client=client[0] if client else "",
        )
        try:
            for authenticator in self._authenticators:
                found = await authenticator.find(credentials, self._timeout_s)
                if found is not None:
                    return found
        except PluginFailed as error:
            raise AuthenticatorFailed(authenticator.plugin) from error
        return None


def _token(headers: Headers) -> bytes:
    """The bearer token, else the key in ``x-api-key``."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


_TICKET_KEY = "enginehouse.ticket"

PUBLIC = frozenset({"/health"})
"""Addresses that need no key, also if they are not found."""


def scope_of(handler: BaseRouteHandler) -> Scope | None:
    """Return the scope that a route requires; None if it is public."""
    return cast(Scope | None, handler.opt.get("scope", "admin"))


_Request = Request[Any, Any, Any]


def check_permissions(admission: Admission) -> Callable[[_Request], Awaitable[None]]:
    """Return the check of every route; it runs once the route is known and its caller is authenticated.

    It is not one of Litestar's guards: for these, it copies the route's handler with every request.
    It refuses before the body is read. It raises MissingScope if the key lacks the scope, NotLocal if a request without
    a key may come from another machine, RateLimited and ServerOverloaded if limits are used up.
    """

    async def check(request: _Request) -> None:
        scope, handler = request.scope, request.route_handler
        record_of(scope).endpoint = scope["path_template"].removeprefix("/v1")
        needed = scope_of(handler)
        key = caller_of(scope).key
        if key is not None and needed is not None and needed not in key.scopes:
            raise MissingScope(needed, sorted(key.scopes))
        if key is None and needed == "admin" and (sign := foreign_sign(scope)) is not None:
            raise NotLocal(sign)
        limits = handler.opt.get("limits")
        if limits is not None:
            ticket = admission.ticket(key, is_generating=limits == "all")
            scope[_TICKET_KEY] = ticket  # type: ignore[literal-required]
            await admission.enter(ticket)

    return check


def may_manage(scope: AsgiScope) -> bool:
    """Return True if the caller of a request may use ``/admin``."""
    key = caller_of(scope).key
    return foreign_sign(scope) is None if key is None else "admin" in key.scopes


def ticket_of(scope: AsgiScope) -> Ticket | None:
    """Return the ticket of a request that counts against limits; None before admission, and for other requests."""
    return cast(Ticket | None, scope.get(_TICKET_KEY))
