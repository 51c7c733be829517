"""Who sends a request, and in which profile: found once by the guard, read by handlers.

The address comes first (``/compat/<profile>/v1/...``), then the key's profile, then the server's.
"""

from __future__ import annotations

from typing import cast

from attrs import frozen
from litestar.types import Scope

from enginehouse.contract.identity import Identity
from enginehouse.settings.profiles import PROFILES, Profile

__all__ = ["CALLER_KEY", "Caller", "caller_of", "split_compat"]

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
