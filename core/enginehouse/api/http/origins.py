"""Web origins: the check of the Origin header, and CORS response headers.

A web page must not reach a server without keys on loopback, so foreign origins are refused unless the settings list
them. Every response to an allowed origin has CORS headers, including errors and streams. Used by the guard.

Replaces Litestar's ``CORSConfig``, which adds headers but does not refuse requests, and does not cover responses that
the guard sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from litestar.types import HTTPScope

from enginehouse.api.http.errors import http_error
from enginehouse.api.http.headers import RATE_HEADERS
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.settings.profiles import PROFILES

__all__ = ["Headers", "Origins", "host_name", "is_preflight", "is_same_origin"]

_METHODS = "DELETE, GET, HEAD, OPTIONS, POST"
_EXPOSED = ", ".join(
    (
        "retry-after",
        "x-request-id",
        "x-enginehouse-ignored",
        "x-enginehouse-unsupported",
        *RATE_HEADERS,
        *(header for profile in PROFILES.values() for header in profile.optimization_headers.values()),
    )
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_MAX_AGE_S = 600

Headers = Mapping[bytes, bytes]
"""Request headers by lower-case name; the first one of repeated headers."""


class Origins:
    """The allowed web origins, and their CORS headers."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = {origin.rstrip("/").lower().encode("utf-8") for origin in allowed}

    def is_allowed(self, headers: Headers) -> bool:
        """Return True if the settings allow the request's Origin header."""
        origin = headers.get(b"origin")
        return origin is not None and (b"*" in self._allowed or origin.lower() in self._allowed)

    def check(self, headers: Headers) -> ErrorAnswer | None:
        """Return the refusal of a foreign origin, or None."""
        origin = headers.get(b"origin")
        if origin is None or self.is_allowed(headers) or is_same_origin(origin, headers.get(b"host", b"")):
            return None
        message = "Web pages of that origin may not call this server; server.cors_origins lists those that may."
        return http_error(403, message, "origin_not_allowed")

    def response_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the CORS headers of every response to an allowed origin."""
        vary = [(b"vary", b"Origin")] if self._allowed else []
        if not self.is_allowed(headers):
            return vary
        exposed = (b"access-control-expose-headers", _EXPOSED.encode())
        return [(b"access-control-allow-origin", headers[b"origin"]), exposed, *vary]

    def preflight_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return further headers of a preflight response; those for the origin are added to every response."""
        if not self.is_allowed(headers):
            return [(b"allow", _METHODS.encode())]
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        names = ["authorization", "content-type", "x-api-key"]
        if _HEADER_NAMES.fullmatch(asked):
            names += [name.strip().lower() for name in asked.split(",") if name.strip()]
        asks_for_private = headers.get(b"access-control-request-private-network", b"").strip().lower() == b"true"
        private = [(b"access-control-allow-private-network", b"true")] if asks_for_private else []
        return [
            *private,
            (b"access-control-allow-methods", _METHODS.encode()),
            (b"access-control-allow-headers", ", ".join(dict.fromkeys(names)).encode()),
            (b"access-control-max-age", str(_MAX_AGE_S).encode()),
        ]


def is_preflight(scope: HTTPScope, headers: Headers) -> bool:
    """Return True for a CORS preflight request."""
    return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def host_name(value: str) -> str:
    """Return the name or address in a Host header, without port and brackets, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.rpartition(":")[0] if value.count(":") == 1 else value


def is_same_origin(origin: bytes, host: bytes, scheme: str | None = None) -> bool:
    """Return True if a page was served by this server.

    Args:
        host: the Host header.
        scheme: the server's scheme; None accepts both, because with a TLS proxy pages have another one than the
            server.
    """
    try:
        parts = urlsplit(origin.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        return False
    schemes = ("http", "https") if scheme is None else (scheme,)
    return parts.scheme in schemes and bool(host) and parts.netloc.lower() == host.decode("latin-1").lower()
