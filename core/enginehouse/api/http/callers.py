"""Who calls: the keys of the server first, then the plugins that may recognise callers. Used by the guard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from litestar.types import HTTPScope

from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.origins import Headers
from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins.authenticator import Authenticator

__all__ = ["Callers", "ExpiredKey"]


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
