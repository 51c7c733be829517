"""The suite of authenticators passes on one that is right and fails on those that are wrong."""

from __future__ import annotations

import pytest

from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.plugins.guarded import Authenticator
from enginehouse_testkit.authenticator_contract import AuthenticatorContract

USERS = {"alice-token": Identity(name="alice"), "bob-token": Identity(name="bob", max_concurrent=2)}


class TestTable(AuthenticatorContract):
    """A table of tokens."""

    known = tuple(Credentials(token=token) for token in USERS)
    unknown = (Credentials(token="mallory"),)

    @pytest.fixture(scope="class")
    @classmethod
    def ask(cls):
        return lambda credentials: USERS.get(credentials.token)


def by_prefix(credentials: Credentials) -> Identity | None:
    return next((user for token, user in USERS.items() if credentials.token.startswith(token)), None)


def everybody(credentials: Credentials) -> Identity | None:
    return Identity(name="somebody")


def local(credentials: Credentials) -> Identity | None:
    return Identity(name="local") if credentials.client == "127.0.0.1" else USERS.get(credentials.token)


def leaking(credentials: Credentials) -> Identity | None:
    return Identity(name=credentials.token) if credentials.token in USERS else None


def tables(credentials: Credentials) -> object:
    return {"name": "alice"} if credentials.token in USERS else None


def limitless(credentials: Credentials) -> Identity | None:
    return Identity(name="x", max_concurrent=0) if credentials.token in USERS else None


@pytest.mark.parametrize(
    "wrong",
    [
        Identity(name="x", requests_per_minute=0),
        Identity(name="x", tokens_per_minute=0),
        Identity(name="x", max_concurrent=-1),
        Identity(name="x", namespace="alice\0salt"),
    ],
)
def test_identities_that_would_be_let_in_with_more_than_was_meant_are_refused(wrong: Identity) -> None:
    """A limit of nothing is no limit further on, and a namespace with a NUL might be another caller's with a salt."""
    with pytest.raises(PluginError):
        Authenticator("kit", lambda credentials: wrong).identify(Credentials(token="x"))


@pytest.mark.parametrize(
    ("ask", "test"),
    [
        (by_prefix, "test_credentials_that_were_changed_are_not_let_in"),
        (everybody, "test_unknown_callers_are_not_let_in"),
        (everybody, "test_nobody_without_credentials_is_let_in"),
        (everybody, "test_noise_is_not_let_in"),
        (everybody, "test_long_credentials_are_answered_soon"),
        (local, "test_nobody_without_credentials_is_let_in"),
        (leaking, "test_identities_do_not_show_their_credentials"),
        (limitless, "test_known_callers_are_identified"),
        (tables, "test_known_callers_are_identified"),
    ],
)
def test_the_suite_finds_what_is_wrong(ask, test: str) -> None:
    class Wrong(AuthenticatorContract):
        known = TestTable.known
        unknown = TestTable.unknown

    with pytest.raises(Exception):  # noqa: B017 - an assertion of the suite, or what the border made of a wrong answer
        getattr(Wrong(), test)(Authenticator("kit", ask))
