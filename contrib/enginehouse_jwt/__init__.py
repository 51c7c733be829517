"""Plugin ``jwt``: authenticates JSON Web Tokens signed by a trusted issuer. Hook implementations only."""

from __future__ import annotations

from enginehouse import hookimpl
from enginehouse.contract.identity import Credentials, Identity
from enginehouse_jwt.options import JwtOptions
from enginehouse_jwt.verifying import identify

__all__ = ["authenticate", "options"]

options = JwtOptions


@hookimpl
def authenticate(credentials: Credentials, options: JwtOptions) -> Identity | None:
    """Return the token's owner; None without a token, or if its signature, time or claims are invalid."""
    return identify(credentials.token, options)
