"""Plugin ``jwt``: callers with JSON Web Tokens, signed by whoever the settings trust. Hook implementations only."""

from __future__ import annotations

from enginehouse import hookimpl
from enginehouse.contract.identity import Credentials, Identity
from enginehouse_jwt.options import JwtOptions
from enginehouse_jwt.verifying import identify

__all__ = ["authenticate", "options"]

options = JwtOptions


@hookimpl
def authenticate(credentials: Credentials, options: JwtOptions) -> Identity | None:
    """Whose token it is; None when there is none, or its signature or time is wrong."""
    return identify(credentials.token, options)
