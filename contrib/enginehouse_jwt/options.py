"""``[plugins.jwt]``: trusted issuer, and the interpretation of claims."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, min_len, optional

from enginehouse.contract.identity import Scope

__all__ = ["JwtOptions"]

_SHARED = ("HS256", "HS384", "HS512")
_PUBLIC = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""A public key must never be used as a shared secret, because it is known to everyone."""


@frozen(kw_only=True)
class JwtOptions:
    """Source of the key (one of the first four), and interpretation of a token's claims.

    Attributes:
        secret: shared with the issuer, for HS256.
        secret_env: environment variable that contains the secret.
        public_key_file: the issuer's public key (PEM), for RS256 or ES256.
        jwks_file: the issuer's public keys as a JSON Web Key Set, reloaded when it changes; ``kid`` selects one.
        algorithms: allowed signature algorithms; unset is HS256 for a secret, RS256 and ES256 for public keys.
        issuer: required value of ``iss``; unset allows any.
        audience: required value in ``aud``; unset allows any, but a token that has an audience is then refused.
        leeway_s: allowed clock difference in seconds.
        name_claim: claim with the caller's name.
        scopes_claim: claim with the scopes, as a list or separated by spaces; words that are not scopes here are
            ignored.
        default_scopes: scopes of tokens without that claim.
        models_claim: claim with the names of the allowed models; without the claim all.
        namespace_claim: claim with the namespace of the prefix cache; without the claim the caller's own.
        profile_claim: claim with the API profile of the caller's requests.
        limits_claim: claim with an object with any of ``requests_per_minute``, ``tokens_per_minute``,
            ``max_concurrent`` and ``priority``.
    """

    secret: str | None = field(default=None, repr=False)
    secret_env: str | None = None
    public_key_file: str | None = None
    jwks_file: str | None = None
    algorithms: tuple[str, ...] | None = field(default=None, validator=optional(min_len(1)))
    issuer: str | None = None
    audience: str | None = None
    leeway_s: float = field(default=10.0, validator=ge(0))
    name_claim: str = "sub"
    scopes_claim: str = "scope"
    default_scopes: tuple[Scope, ...] = ("infer",)
    models_claim: str = "models"
    namespace_claim: str = "namespace"
    profile_claim: str = "profile"
    limits_claim: str = "limits"

    def __attrs_post_init__(self) -> None:
        """Check that at most one key is configured, and that its type suits the algorithms."""
        sources = [self.secret, self.secret_env, self.public_key_file, self.jwks_file]
        if sum(source is not None for source in sources) > 1:
            raise ValueError("name one of secret, secret_env, public_key_file and jwks_file")
        suitable = _SHARED if self.is_shared else _PUBLIC
        if not set(self.allowed) <= set(suitable):
            raise ValueError(f"'algorithms' must suit the key, so be of {', '.join(suitable)}")
        if self.secret is not None and len(self.secret.encode()) < self.min_secret_bytes:
            raise ValueError(f"'secret' must have at least {self.min_secret_bytes} bytes")

    @property
    def is_shared(self) -> bool:
        """True if the key is a secret shared with the issuer."""
        return self.public_key_file is None and self.jwks_file is None

    @property
    def allowed(self) -> tuple[str, ...]:
        """Allowed signature algorithms."""
        return self.algorithms or (("HS256",) if self.is_shared else ("RS256", "ES256"))

    @property
    def min_secret_bytes(self) -> int:
        """Minimum secret length for the allowed algorithms, by RFC 7518; shorter secrets can be brute-forced."""
        return max(int(name.removeprefix("HS")) // 8 for name in self.allowed)
