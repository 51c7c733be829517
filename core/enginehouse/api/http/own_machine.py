"""Detection of requests that come directly from the server's own machine. Used if there are no keys.

A loopback peer is not sufficient: a proxy or a web page on this machine forwards requests of others. So the request
must also name a loopback host, carry no header that proxies add, and not come from a web page of another origin, even
if ``server.cors_origins`` allows that page to use the models. A proxy that adds no header and rewrites ``Host`` cannot
be detected; a server with such a proxy in front needs keys.
"""

from __future__ import annotations

from litestar.types import Scope

from enginehouse.api.http.origins import host_name, is_same_origin
from enginehouse.settings.config import is_loopback

__all__ = ["foreign_sign", "is_unix_socket"]

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
