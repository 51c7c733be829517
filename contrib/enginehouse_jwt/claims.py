"""Converts the claims of a verified token to the permissions of its owner."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast, get_args

from enginehouse.contract.errors import PluginError
from enginehouse.contract.identity import Identity, Scope
from enginehouse_jwt.options import JwtOptions

__all__ = ["InvalidClaim", "read_claims"]


class InvalidClaim(PluginError):
    """A claim of a verified token about the caller's permissions is missing or invalid."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "jwt")


_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "priority")


def read_claims(claims: Mapping[str, Any], options: JwtOptions) -> Identity:
    """Return the caller described by the claims.

    Raises:
        InvalidClaim: a claim about the caller's permissions is invalid; the caller is denied, never given more.
    """
    models = claims.get(options.models_claim)
    return Identity(
        name=_text(claims, options.name_claim) or _missing(options.name_claim),
        scopes=_scopes(claims.get(options.scopes_claim), options),
        models=None if models is None else frozenset(_words(models, options.models_claim)),
        profile=_text(claims, options.profile_claim),
        namespace=_text(claims, options.namespace_claim) or "",
        expires=datetime.fromtimestamp(float(claims["exp"]) + options.leeway_s, UTC),
        **_limits(claims.get(options.limits_claim), options.limits_claim),
    )


def _scopes(given: Any, options: JwtOptions) -> frozenset[Scope]:
    if given is None:
        return frozenset(options.default_scopes)
    known = frozenset(get_args(Scope)) & frozenset(_words(given, options.scopes_claim))
    return cast(frozenset[Scope], known)


def _words(value: Any, claim: str) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidClaim(f"the claim {claim!r} must be a list of strings, or one with spaces between")
    return words


def _text(claims: Mapping[str, Any], claim: str) -> str | None:
    value = claims.get(claim)
    if value is not None and not isinstance(value, str):
        raise InvalidClaim(f"the claim {claim!r} must be a string")
    return value


def _limits(given: Any, claim: str) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not given.keys() <= set(_LIMITS):
        raise InvalidClaim(f"the claim {claim!r} must be an object with {', '.join(_LIMITS)}")
    for name, value in given.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or (value < 1 and name != "priority"):
            raise InvalidClaim(f"{name} in the claim {claim!r} must be a whole number of at least 1")
    return given


def _missing(claim: str) -> str:
    raise InvalidClaim(f"the token has no claim {claim!r}, which names its owner")
