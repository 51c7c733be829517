"""Origins of requests: web origins with their CORS headers, and the server's own machine.

A web page must not reach a server without keys on loopback, so foreign origins are refused unless the settings list
them. Every response to an allowed origin has CORS headers, including errors and streams; Litestar's ``CORSConfig`` adds
headers but does not refuse requests, and does not cover responses that the guard sends.

A loopback peer is not sufficient to be managed from: a proxy or a web page on this machine forwards requests of others.
So such a request must also name a loopback host, carry no header that proxies add, and not come from a web page of
another origin, even if ``server.cors_origins`` allows that page to use the models. A proxy that adds no header and
rewrites ``Host`` cannot be detected; a server with such a proxy in front needs keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from litestar.types import HTTPScope, Scope

from enginehouse.api.http.access import RATE_HEADERS
from enginehouse.api.http.errors import http_error
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.settings.config import is_loopback
from enginehouse.settings.profiles import PROFILES

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


_PROXY_HEADERS = frozenset(
    {
        b"cdn-loop",
        b"client-ip",
        b"fastly-client-ip",
        b"fly-client-ip",
        b"forwarded",
        b"forwarded-for",
        b"proxy-connection",
        b"true-client-ip",
        b"via",
        b"x-client-ip",
        b"x-cluster-client-ip",
        b"x-forwarded",
        b"x-host",
        b"x-original-host",
        b"x-original-url",
        b"x-proxyuser-ip",
        b"x-real-ip",
        b"x-remote-addr",
        b"x-remote-ip",
        b"x-rewrite-url",
        b"x-scheme",
    }
)
_PROXY_PREFIXES = (
    b"cf-",
    b"tailscale-",
    b"x-amzn-",
    b"x-appengine-",
    b"x-arr-",
    b"x-azure-",
    b"x-envoy-",
    b"x-forwarded-",
    b"x-nginx-",
    b"x-original-forwarded-",
    b"x-vercel-",
)


def foreign_sign(scope: Scope) -> str | None:
    """Return the evidence, for messages, that a request may not come from the server's own machine, or None."""
    client = scope.get("client")
    if client is None and not is_unix_socket(scope):
        return "the address of the caller is not known"
    if client is not None and not is_loopback(client[0]):
        return "the caller is on another machine"
    for name, _ in scope["headers"]:
        if name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES):
            return f"the header {name.decode('latin-1')!r} says that it came through a proxy"
    if scope.get("http_version") == "1.0":  # nginx's default for upstream requests, which have none of those headers
        return "it is written in HTTP/1.0, as by a proxy"
    return _foreign_address(scope) or _foreign_page(scope)


def is_unix_socket(scope: Scope) -> bool:
    """Return True if a request came through a Unix domain socket, which only processes of this machine can open."""
    server = scope.get("server")
    return scope.get("client") is None and (server is None or server[1] is None)


def _foreign_address(scope: Scope) -> str | None:
    for value in _values(scope, b"host"):
        if not is_loopback(host_name(value)):
            return "its Host header does not name a loopback address"
    return None


def _foreign_page(scope: Scope) -> str | None:
    (host,) = _values(scope, b"host")
    for origin in _values(scope, b"origin"):
        if not is_same_origin(origin.encode("latin-1"), host.encode("latin-1"), str(scope["scheme"])):
            return "it comes from a web page of another origin"
    # Browsers send some requests without an Origin, but with this header.
    if any(value.strip().lower() not in ("same-origin", "none") for value in _values(scope, b"sec-fetch-site")):
        return "it comes from a web page of another origin"
    return None


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]
