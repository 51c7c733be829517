"""Callers: API keys and plugins that authenticate, the profile in use, and what a caller may do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from attrs import frozen
from litestar.types import HTTPScope, Scope

from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.origins import Headers
from enginehouse.contract.errors import InvalidRequest, ModelNotFound, PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins.authenticator import Authenticator
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.settings.config import ServerSettings
from enginehouse.settings.profiles import PROFILES, Profile

__all__ = [
    "CALLER_KEY",
    "Caller",
    "Callers",
    "ExpiredKey",
    "caller_of",
    "check_model",
    "check_priority",
    "may_see_prompts",
    "may_use",
    "shown_as",
    "split_compat",
]

CALLER_KEY = "enginehouse.caller"
"""Where the caller of a request lies in its ASGI scope."""

_COMPAT = "/compat/"


@frozen(kw_only=True)
class Caller:
    """Who sends a request.

    Attributes:
        profile: the API that the answer is written in.
        key: whom its key, or a plugin, says it is; None on a server without keys, and at public addresses.
        named_profile: the profile that the address names, if any.
    """

    profile: Profile
    key: Identity | None = None
    named_profile: Profile | None = None

    @property
    def name(self) -> str:
        """By what it is told from other callers in queues; all are one on a server without keys."""
        return "" if self.key is None else self.key.name

    @property
    def allowed_models(self) -> frozenset[str] | None:
        """Names of the models that it may use; None is all."""
        return None if self.key is None or self.key.models is None else frozenset(self.key.models)

    def namespace(self, salt: str, cache_key: str | None = None) -> str:
        """The prefix-cache namespace of a request: nobody else's, unless keys share theirs.

        Args:
            salt: its ``cache_salt``.
            cache_key: its ``prompt_cache_key``.
        """
        # The first NUL ends the key's part, in which there is none, so no two pairs make the same text. Behind it a
        # caller may well write the same in two ways: that takes the salt, which only who may share it knows.
        own = salt if not cache_key else f"{salt}\0{cache_key}"
        return own if self.key is None else f"{self.key.namespace or self.key.name}\0{own}"


def caller_of(scope: Scope) -> Caller:
    """The caller of a request that the guard let in."""
    return cast(Caller, scope[CALLER_KEY])  # type: ignore[literal-required]


def split_compat(path: str) -> tuple[Profile | None, str]:
    """The profile that an address names, and the address of the same route without it.

    ``/compat/octomil/v1/models`` is ``/v1/models`` in the profile octomil. Other addresses, those of unknown
    profiles included, are returned as they are.
    """
    if path.startswith(_COMPAT):
        name, slash, rest = path.removeprefix(_COMPAT).partition("/")
        if name in PROFILES and slash and rest.startswith("v1/"):
            return PROFILES[name], f"/{rest}"
    return None, path


def may_use(caller: Caller, name: str, asked: str | None = None) -> bool:
    """Whether a caller may use the model ``name`` when it asks for it as ``asked``.

    A list that holds a model's name allows its aliases as well; one that holds an alias allows that alias only.
    """
    allowed = caller.key.models if caller.key is not None else None
    return allowed is None or name in allowed or asked in allowed


def check_model(caller: Caller, asked: str | None, manager: ModelManager) -> None:
    """Refuse a model that the caller may not use, before anything is loaded for it.

    Raises:
        ModelNotFound: there is no such model for this caller.
    """
    if caller.key is not None and caller.key.models is not None:
        model = manager.find(asked)
        if not may_use(caller, model.name, asked):
            raise ModelNotFound(asked or model.name)


def shown_as(caller: Caller, status: ModelStatus) -> list[str]:
    """The names by which a caller may ask for a model, the one that it is listed by first; none where it may not."""
    return [name for name in (status.name, *status.aliases) if may_use(caller, status.name, name)]


def may_see_prompts(caller: Caller, server: ServerSettings, *, is_local: bool) -> bool:
    """Whether a caller may see text of other requests: if the operator allows it, those to whom ``/admin`` is open."""
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
    """The key is right, but its time is over."""


class Callers:
    """Recognises callers.

    Args:
        keys: of the settings and the key file.
        authenticators: asked in this order for callers without such a key.
    """

    def __init__(self, keys: KeyStore, authenticators: Sequence[Authenticator]) -> None:
        self._keys = keys
        self._authenticators = authenticators

    @property
    def are_checked(self) -> bool:
        """Whether only callers that are recognised are served."""
        return self._keys.needs_key

    def by_key(self, headers: Headers) -> Identity | None:
        """Whose key came with a request; None when it is none of ours, and when none is needed.

        Raises:
            ExpiredKey: it was one of ours.
        """
        ring = self._keys.ring
        if not self.are_checked or ring.is_empty:
            return None
        found = ring.find(_token(headers))
        if found is not None and found.is_expired(datetime.now(UTC)):
            raise ExpiredKey
        return found

    async def by_plugin(self, scope: HTTPScope, headers: Headers) -> Identity | None:
        """Whom a plugin recognises; None when no plugin does, or one failed."""
        if not self._authenticators:
            return None
        client = scope.get("client")
        credentials = Credentials(
            token=_token(headers).decode("latin-1"),
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()},
            client=client[0] if client else "",
        )
        return await asyncio.to_thread(self._ask, credentials)

    def _ask(self, credentials: Credentials) -> Identity | None:
        try:
            for authenticator in self._authenticators:
                found = authenticator.identify(credentials)
                if found is not None:
                    return found
        except PluginError:
            return None  # denied; the reason is in the log
        return None


def _token(headers: Headers) -> bytes:
    """The bearer token, else the key in ``x-api-key``."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
