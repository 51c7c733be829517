"""Contract suite for authenticators (the hook ``authenticate``), as a test class.

::

    class TestMyAuthenticator(AuthenticatorContract):
        known = (Credentials(token="right"),)
        unknown = (Credentials(token="wrong"),)

        @pytest.fixture(scope="class")
        @classmethod
        def ask(cls):
            return partial(my_plugin.authenticate, options=MyOptions())

``ask`` takes ``credentials`` as the hook does. Without ``known`` the suite only tests that unauthorized callers are
rejected.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, get_args

import pytest
from attrs import evolve

from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Credentials, Identity, Scope
from enginehouse.plugins.guarded import Authenticator

__all__ = ["AuthenticatorContract"]

_MOST_S = 5.0
"""Maximum time per call, as requests wait for it; generous, since tests run on busy machines."""


class AuthenticatorContract:
    """Tests every externally observable guarantee of the hook ``authenticate``.

    Attributes:
        known: credentials of callers that it recognises.
        unknown: credentials that it must not accept.
    """

    known: ClassVar[tuple[Credentials, ...]] = ()
    unknown: ClassVar[tuple[Credentials, ...]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def authenticator(cls, ask: Callable[..., Identity | None]) -> Authenticator:
        """The hook as the server calls it."""
        return Authenticator("kit", ask)

    def test_known_callers_are_identified(self, authenticator: Authenticator) -> None:
        """Identities are complete: a name, existing scopes, and valid limits."""
        for credentials in self.known:
            found = authenticator.identify(credentials)

            assert found is not None
            plugin, _, name = found.name.partition(":")
            assert plugin == authenticator.plugin and name
            assert found.scopes <= set(get_args(Scope))
            assert found.namespace
            for limit in (found.requests_per_minute, found.tokens_per_minute, found.max_concurrent):
                assert limit is None or limit > 0
            assert found.models is None or all(isinstance(name, str) for name in found.models)

    def test_the_same_credentials_are_the_same_caller(self, authenticator: Authenticator) -> None:
        """Limits and prefix caches depend on the name."""
        for credentials in self.known:
            assert authenticator.identify(credentials) == authenticator.identify(credentials)

    def test_unknown_callers_are_not_let_in(self, authenticator: Authenticator) -> None:
        """Unknown credentials give None or an exception."""
        for credentials in self.unknown:
            assert not _accepts(authenticator, credentials)

    def test_nobody_without_credentials_is_let_in(self, authenticator: Authenticator) -> None:
        """Missing and empty credentials are rejected."""
        for credentials in (Credentials(), Credentials(token=" "), Credentials(client="127.0.0.1")):
            assert not _accepts(authenticator, credentials)

    def test_noise_is_not_let_in(self, authenticator: Authenticator) -> None:
        """Random bytes that a header can carry are rejected."""
        chance = random.Random(0)
        for length in (1, 8, 40, 200):
            for _ in range(25):
                token = bytes(chance.randrange(1, 256) for _ in range(length)).decode("latin-1")
                assert not _accepts(authenticator, Credentials(token=token))

    def test_credentials_that_were_changed_are_not_let_in(self, authenticator: Authenticator) -> None:
        """A token with one character removed, added or replaced is rejected."""
        chance = random.Random(1)
        for credentials in self.known:
            token = credentials.token
            if not token:
                continue
            middle = len(token) // 2
            changed = [token[:-1], token[1:], f"{token}x", f"x{token}", token[:middle] + token[middle + 1 :]]
            for _ in range(10):
                place = chance.randrange(len(token) - 2)  # the last characters of base64 may carry unused bits
                other = "A" if token[place] != "A" else "B"
                changed.append(token[:place] + other + token[place + 1 :])
            for text in changed:
                assert not _accepts(authenticator, evolve(credentials, token=text)), text

    def test_long_credentials_are_answered_soon(self, authenticator: Authenticator) -> None:
        """Credentials as long as a request's head may be are handled quickly."""
        for token in ("x" * 60_000, "." * 60_000, "a.b." * 15_000):
            began = time.monotonic()
            assert not _accepts(authenticator, Credentials(token=token))
            assert time.monotonic() - began < _MOST_S

    def test_several_threads_may_ask_at_once(self, authenticator: Authenticator) -> None:
        """Concurrent calls give the same results as sequential ones."""
        asked = [*self.known, Credentials(token="nobody's")] * 8
        alone = [_name(authenticator, credentials) for credentials in asked]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda credentials: _name(authenticator, credentials), asked))

        assert together == alone

    def test_identities_do_not_show_their_credentials(self, authenticator: Authenticator) -> None:
        """Names appear in logs and must not contain credentials."""
        for credentials in self.known:
            found = authenticator.identify(credentials)
            assert not credentials.token or credentials.token not in repr(found)


def _name(authenticator: Authenticator, credentials: Credentials) -> str | None:
    try:
        found = authenticator.identify(credentials)
    except PluginError:
        return None
    return found.name if found is not None else None


def _accepts(authenticator: Authenticator, credentials: Credentials) -> bool:
    return _name(authenticator, credentials) is not None
