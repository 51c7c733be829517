"""Maps a bearer token to its owner, after verifying its signature, time, issuer and audience."""

from __future__ import annotations

import logging

from enginehouse.contract.errors import MissingDependency
from enginehouse.contract.identity import Identity
from enginehouse_jwt.claims import InvalidClaim, read_claims
from enginehouse_jwt.issuer_keys import key_for
from enginehouse_jwt.options import JwtOptions

__all__ = ["identify"]

_log = logging.getLogger(__name__)

_NUM_PARTS = 3  # of a signed token: header, claims, signature


def identify(token: str, options: JwtOptions) -> Identity | None:
    """Return the token's owner; None if it is not the issuer's, not yet valid, expired, or has invalid claims.

    Raises:
        MissingDependency: PyJWT is not installed.
        PluginError: the settings name no usable key.
    """
    if token.count(".") != _NUM_PARTS - 1:
        return None
    try:
        import jwt  # noqa: PLC0415 - the library is imported when the first token comes
    except ImportError as error:
        raise MissingDependency("PyJWT", "jwt") from error
    try:
        key = key_for(jwt.get_unverified_header(token), options)
        if key is None:
            return None
        claims = jwt.decode(
            token,
            key,
            algorithms=list(options.allowed),
            audience=options.audience,
            issuer=options.issuer,
            leeway=options.leeway_s,
            options={"require": ["exp"], "verify_aud": True},
        )
    except (jwt.InvalidTokenError, jwt.InvalidKeyError, RecursionError):
        return None
    try:
        return read_claims(claims, options)
    except InvalidClaim as error:
        _log.warning("a token was refused: %s", error)
        return None
