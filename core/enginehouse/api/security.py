"""The guard in front of every route: who may call, from where, with what.

A plain ASGI wrapper, so that it also covers addresses that do not exist. In this order: the access
record; Host (against DNS rebinding); Origin and CORS (a web page must not reach a keyless server on
loopback); API keys, for everything but ``/health``; the content type of POSTs.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from enginehouse.api.access import RECORD_KEY, AccessRecord
from enginehouse.api.errors import ErrorAnswer, describe, http_error
from enginehouse.config import Settings, is_loopback

__all__ = ["Guard", "Headers", "note_outcome"]

_PUBLIC = frozenset({"/health"})
_METHODS = "GET, HEAD, OPTIONS, POST"
_EXPOSED = "retry-after, x-request-id, x-enginehouse-ignored, x-enginehouse-unsupported"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_MAX_AGE_S = 600

Headers = Mapping[bytes, bytes]


def note_outcome(scope: Scope, outcome: str) -> None:
    """Write an outcome into the access record of a request."""
    record: AccessRecord = scope[RECORD_KEY]  # type: ignore[literal-required]
    record.outcome = outcome


class Guard:
    """Lets requests through to ``app`` or answers them itself."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.auth.keys)
        self._origins = _Origins(settings.server.cors_origins)
        self._hosts = _Hosts(settings.server.host, settings.server.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        record = AccessRecord(method=scope["method"], path=scope["path"])
        scope[RECORD_KEY] = record  # type: ignore[literal-required]
        headers: Headers = dict(reversed([*scope["headers"]]))  # of repeated headers the first one counts
        cors = self._origins.response_headers(headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if cors:
                    message["headers"] = [*message.get("headers", ()), *cors]
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_with_headers)
        finally:
            record.write()

    async def _answer(self, scope: HTTPScope, headers: Headers, receive: Receive, send: Send) -> None:
        refusal = self._hosts.check(scope) or self._origins.check(headers)
        if refusal is None and _is_preflight(scope, headers):
            fields = [*self._origins.preflight_headers(headers), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 204, "headers": fields})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        refusal = refusal or self._check_key(scope, headers) or _check_content_type(scope, headers)
        if refusal is not None:
            note_outcome(scope, refusal.code)
            await _send_error(send, refusal)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # border: nothing that a request causes reaches the server loop
            note_outcome(scope, describe(error).code)
            raise

    def _check_key(self, scope: HTTPScope, headers: Headers) -> ErrorAnswer | None:
        if not self._keys or scope["path"] in _PUBLIC:
            return None
        scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        given = credentials.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Every key is compared, on bytes, so that time tells nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if any(matches):
            return None
        message = "A valid API key is needed: 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
        return http_error(401, message, www_authenticate="Bearer")


class _Hosts:
    """Which Host headers are answered."""

    def __init__(self, bound: str, allowed: tuple[str, ...]) -> None:
        self._allowed = {name.lower() for name in (bound, *allowed)}
        # On a wildcard address every address of this machine is "the bind address". Addresses cannot be
        # rebound by DNS, so any is fine; names must be listed.
        self._any_address = _is_wildcard(bound)
        self._any = "*" in allowed

    def check(self, scope: HTTPScope) -> ErrorAnswer | None:
        """The refusal, or None."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) != 1:
            return http_error(400, "The request needs exactly one Host header.")
        host = _host_name(values[0].decode("latin-1"))
        if self._any or host in self._allowed or is_loopback(host) or (self._any_address and _is_address(host)):
            return None
        message = "This server does not answer for that Host; server.allowed_hosts lists further names."
        return http_error(403, message, "host_not_allowed")


class _Origins:
    """Which web origins may call, and what browsers are told about it."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = {origin.rstrip("/").lower().encode("utf-8") for origin in allowed}

    def is_allowed(self, headers: Headers) -> bool:
        """Whether the request names an origin that the settings allow."""
        origin = headers.get(b"origin")
        return origin is not None and (b"*" in self._allowed or origin.lower() in self._allowed)

    def check(self, headers: Headers) -> ErrorAnswer | None:
        """The refusal of a foreign origin, or None."""
        origin = headers.get(b"origin")
        if origin is None or self.is_allowed(headers) or _is_same_origin(origin, headers.get(b"host", b"")):
            return None
        message = "Web pages of that origin may not call this server; server.cors_origins lists those that may."
        return http_error(403, message, "origin_not_allowed")

    def response_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """CORS headers of every response to an allowed origin."""
        vary = [(b"vary", b"Origin")] if self._allowed else []
        if not self.is_allowed(headers):
            return vary
        exposed = (b"access-control-expose-headers", _EXPOSED.encode())
        return [(b"access-control-allow-origin", headers[b"origin"]), exposed, *vary]

    def preflight_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Further headers of the answer to a preflight; those for the origin are added to every response."""
        if not self.is_allowed(headers):
            return [(b"allow", _METHODS.encode())]
        asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        names = ["authorization", "content-type", "x-api-key"]
        if _HEADER_NAMES.fullmatch(asked):
            names += [name.strip().lower() for name in asked.split(",") if name.strip()]
        return [
            (b"access-control-allow-methods", _METHODS.encode()),
            (b"access-control-allow-headers", ", ".join(dict.fromkeys(names)).encode()),
            (b"access-control-max-age", str(_MAX_AGE_S).encode()),
        ]


def _is_preflight(scope: HTTPScope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def _check_content_type(scope: HTTPScope, headers: Headers) -> ErrorAnswer | None:
    """POSTs must be JSON: a web page can send other types without asking first."""
    if scope["method"] != "POST":
        return None
    kind, _, parameters = headers.get(b"content-type", b"").decode("latin-1").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if kind.strip() == "application/json" and (charset is None or charset[1] in ("utf-8", "utf8")):
        return None
    return http_error(415, "The request body must be JSON in UTF-8, with 'Content-Type: application/json'.")


async def _send_error(send: Send, answer: ErrorAnswer) -> None:
    body = answer.body()
    fields = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        *answer.headers,
    ]
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _host_name(value: str) -> str:
    """The name or address in a Host header, without port and brackets, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.rpartition(":")[0] if value.count(":") == 1 else value


def _is_same_origin(origin: bytes, host: bytes) -> bool:
    """Whether the page came from this very server."""
    try:
        parts = urlsplit(origin.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        return False
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.decode("latin-1").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host in ("", "*") or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
