"""Maps a bearer token to its owner, after verifying its signature, time, issuer and audience."""

from __future__ import annotations

from enginehouse.contract.errors import MissingDependency
from enginehouse.contract.identity import Identity
from enginehouse_jwt.claims import read_claims
from enginehouse_jwt.issuer_keys import key_for
from enginehouse_jwt.options import JwtOptions

__all__ = ["identify"]

_NUM_PARTS = 3  # of a signed token: header, claims, signature


def identify(token: str, options: JwtOptions) -> Identity | None:
    """Return the token's owner; None if it is not a token of the issuer, not yet valid, or expired.

    Raises:
        MissingDependency: PyJWT is not installed.
        InvalidClaim: a verified token has an invalid claim.
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
    return read_claims(claims, options)
