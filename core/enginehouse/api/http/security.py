"""The guard in front of every route: checks origin, caller and content type of requests.

A plain ASGI wrapper instead of Litestar middleware, so that it also covers paths that do not exist. In this order: the
access record; the profile in the path; Host (against DNS rebinding); Origin and CORS; API keys or authenticator
plugins, for all routes that ``callers`` does not list as public; the content type of POSTs. Permissions are checked
once the route is known, see ``callers``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import msgspec
from attrs import evolve
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from enginehouse.api.http.access import (
    RECORD_KEY,
    REQUEST_ID_HEADER,
    AccessRecord,
    rate_headers,
    record_of,
    sent_request_id,
)
from enginehouse.api.http.admission import EVERYBODY, NOT_RECOGNISED, Admission, Reservation
from enginehouse.api.http.callers import (
    CALLER_KEY,
    PUBLIC,
    Caller,
    Callers,
    ExpiredKey,
    caller_of,
    split_compat,
    ticket_of,
)
from enginehouse.api.http.errors import AuthenticatorFailed, BodyTooLarge, describe, error_body, for_client, http_error
from enginehouse.api.http.origins import Headers, Origins, host_name, is_preflight
from enginehouse.api.http.pages import Pages
from enginehouse.contract.errors import EnginehouseError, InvalidRequest, PluginFailed
from enginehouse.contract.identity import Identity
from enginehouse.contract.surface import ErrorAnswer, Reply, Surface
from enginehouse.plugins import are_foreign, guard_of
from enginehouse.plugins.guard import current_request
from enginehouse.settings.config import Settings, is_loopback
from enginehouse.settings.profiles import DEFAULT_PROFILE, PROFILES

CONNECTION_KEY = "enginehouse.connection"
"""Key of the reservation of a request's connection in its ASGI scope."""

_REQUEST_KEY = "enginehouse.request_memory"
"""Key of the reservation of a request in its ASGI scope."""

_SURFACE_KEY = "enginehouse.surface"
"""Key of the surface of a request's address in its ASGI scope."""

_MAX_TRACE_BYTES = 512
_MAX_SHOWN_CHARS = 100


def note_outcome(scope: Scope, outcome: str) -> None:
    """Set the outcome in the access record of a request."""
    record_of(scope).outcome = outcome


_Written = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and body of a response."""


async def written_error(answer: ErrorAnswer, scope: Any) -> _Written:
    """Return status, headers and body of the response to an error.

    They are those of the surface of the address, with the codes of the caller's profile.
    """
    surface = _surface_of(scope)
    if surface is None or not are_foreign(surface):
        return error_at_once(answer, scope)
    told = _told(answer, scope)
    try:
        return await guard_of(surface, "surface").run("error", lambda: _error_of(surface, told))
    except PluginFailed:
        return _plain_error(told)


def error_at_once(answer: ErrorAnswer, scope: Any) -> _Written:
    """Return the same without waiting: the body is core's on addresses of surfaces that are not our own."""
    surface, told = _surface_of(scope), _told(answer, scope)
    if surface is not None and not are_foreign(surface):
        with contextlib.suppress(PluginFailed):
            return _error_of(surface, told)
    return _plain_error(told)


def _error_of(surface: Surface, told: ErrorAnswer) -> _Written:
    with guard_of(surface, "surface").calling("error", passes=(PluginFailed,)):
        reply = surface.error(told)
        body = reply.body if isinstance(reply.body, bytes) else msgspec.json.encode(reply.body)
    return reply.status or told.status, [("content-type", reply.media_type), *told.headers, *reply.headers], body


def _plain_error(told: ErrorAnswer) -> _Written:
    return told.status, [("content-type", Reply().media_type), *told.headers], msgspec.json.encode(error_body(told))


def _told(answer: ErrorAnswer, scope: Any) -> ErrorAnswer:
    """Return an error with the codes of the caller's profile and the id of the request."""
    profile = caller_of(scope).profile if CALLER_KEY in scope else DEFAULT_PROFILE
    answer = for_client(answer, profile)
    return evolve(answer, request_id=record_of(scope).identify()) if RECORD_KEY in scope else answer


class HttpGuard:
    """Passes requests to ``app`` or answers them itself.

    Args:
        callers: authenticates callers.
        admission: closes the tickets of requests, and counts the bytes of their bodies.
        find_surface: returns the surface of a request's path and headers, which writes the bodies of its errors.
        has_head: returns True if a route answers HEAD requests at a path itself; else the GET route there does.
        pages: answers requests for files, which need no key.
        on_end: called with the record of every request when its response has ended.

    Attributes:
        app: the guarded application.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        callers: Callers,
        admission: Admission,
        *,
        find_surface: Callable[[str, Headers], Surface | None],
        has_head: Callable[[str], bool] = lambda path: False,
        pages: Pages | None = None,
        on_end: Callable[[AccessRecord], None] = lambda record: None,
    ) -> None:
        self.app = app
        self._on_end = on_end
        self._callers = callers
        self._admission = admission
        self._find_surface = find_surface
        self._has_head = has_head
        self._pages = pages
        self._profile = PROFILES[settings.server.profile]
        self._origins = Origins(settings.server.cors_origins)
        self._hosts = _Hosts(settings.server.host, settings.server.allowed_hosts)
        self._root_path = settings.server.root_path
        self._max_body_bytes = settings.limits.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        record = AccessRecord(method=scope["method"], path=scope["path"])
        self._take_root_path(scope)
        scope[RECORD_KEY] = record  # type: ignore[literal-required]
        headers: Headers = dict(reversed([*scope["headers"]]))  # the first one of repeated headers counts
        cors = self._origins.response_headers(headers)

        def send_with_headers(message: Message) -> Awaitable[None]:  # not a coroutine: it is called for every token
            if message["type"] == "http.response.start":
                record.status = message["status"]
                ticket = ticket_of(scope)
                rates = rate_headers(ticket) if ticket is not None else ()
                message["headers"] = [*message.get("headers", ()), *_request_ids(scope), *rates, *cors]
            return send(message)

        body = self._admission.memory.open()
        scope[_REQUEST_KEY] = body  # type: ignore[literal-required]
        current_request.set(record.identify)
        try:
            await self._answer(scope, headers, _counted(receive, body, scope), send_with_headers, body)
        finally:
            body.close()
            ticket = ticket_of(scope)
            if ticket is not None:
                await self._admission.close(ticket)
            self.end(record)

    def _take_root_path(self, scope: HTTPScope) -> None:
        """Remove the path prefix that a proxy adds for this server, unless it strips it, so that routes match."""
        root, path = self._root_path, scope["path"]
        if root and (path == root or path.startswith(f"{root}/")):
            scope["path"] = path.removeprefix(root) or "/"
            scope["raw_path"] = scope["path"].encode("utf-8", "surrogateescape")

    def end(self, record: AccessRecord) -> None:
        """Log and count a finished response."""
        record.end()
        self._on_end(record)

    async def _answer(
        self, scope: HTTPScope, headers: Headers, receive: Receive, send: Send, body: Reservation
    ) -> None:
        bad_id = _note_request_id(scope)
        _note_trace(record_of(scope), headers)
        key, no_key = self._find_key(headers)
        self._note_caller(scope, headers, key)
        refusal = self._hosts.check(scope) or self._origins.check(headers)
        if refusal is None and is_preflight(scope, headers):
            fields = [*self._origins.preflight_headers(headers), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 204, "headers": fields})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        is_public = scope["path"] in PUBLIC or (self._pages is not None and self._pages.owns(scope, headers))
        if refusal is None and no_key is not None and not is_public:
            try:
                found = await self._callers.by_plugin(scope, headers)
            except AuthenticatorFailed as error:
                refusal = describe(error)
            else:
                refusal = no_key if found is None else None
                if found is not None:
                    self._note_caller(scope, headers, found)
        refusal = refusal or self._note_owner(scope, body)
        refusal = refusal or _check_content_type(scope, headers) or self._check_length(scope, headers, body) or bad_id
        if refusal is not None:
            note_outcome(scope, refusal.code)
            await _send_error(send, refusal, scope)
            return
        try:
            if self._pages is not None and await self._pages.answer(scope, headers, send):
                return
            if scope["method"] == "HEAD" and not self._has_head(scope["path"]):
                await self.app({**scope, "method": "GET"}, receive, _head_only(send))
            else:
                await self.app(scope, receive, send)
        except Exception as error:
            note_outcome(scope, describe(error, record_of(scope).identify()).code)
            raise

    def _note_caller(self, scope: HTTPScope, headers: Headers, key: Identity | None) -> None:
        """Store the caller in the scope, and remove the profile from the path, so that routes match."""
        if CALLER_KEY in scope:  # a plugin has authenticated a caller without a key
            named = caller_of(scope).named_profile
        else:
            named, path = split_compat(scope["path"])
            if named is not None:
                scope["path"], scope["raw_path"] = path, path.encode("utf-8", "surrogateescape")
        by_key = PROFILES[key.profile] if key is not None and key.profile is not None else None
        profile = named or by_key or self._profile
        scope[CALLER_KEY] = Caller(profile=profile, key=key, named_profile=named)  # type: ignore[literal-required]
        scope[_SURFACE_KEY] = self._find_surface(scope["path"], headers)  # type: ignore[literal-required]
        if key is not None:
            record_of(scope).key = key.name

    def _note_owner(self, scope: HTTPScope, body: Reservation) -> ErrorAnswer | None:
        """Assign the memory of the request and its connection to the caller; return the refusal if that fails."""
        key = caller_of(scope).key
        owner = key.name if key is not None else NOT_RECOGNISED if self._callers.are_checked else EVERYBODY
        body.move(owner)
        connection = connection_of(scope)
        try:
            if connection is not None:
                connection.move(owner)
        except EnginehouseError as error:
            return describe(error)
        return None

    def _find_key(self, headers: Headers) -> tuple[Identity | None, ErrorAnswer | None]:
        """Return the identity of the given key, and the refusal if a valid key is required but was not given."""
        try:
            key = self._callers.by_key(headers)
        except ExpiredKey:
            return None, http_error(401, "This API key has expired.", "expired_api_key", www_authenticate="Bearer")
        return key, _no_key() if key is None and self._callers.are_checked else None

    def check_long_head(self, headers: Headers) -> ErrorAnswer | None:
        """Return the refusal of a request with an oversized head and no valid key: its sender learns nothing more."""
        return self._find_key(headers)[1]

    def _check_length(self, scope: HTTPScope, headers: Headers, body: Reservation) -> ErrorAnswer | None:
        """Refuse a body by its declared length, before reading it."""
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            return None
        most = min(self._max_body_bytes, self._admission.memory.share(body.owner))
        if int(length) > most:
            return describe(BodyTooLarge.of(most))
        try:
            connection = connection_of(scope)  # may already hold the beginning of the body
            body.check(max(0, int(length) - (connection.num_bytes if connection is not None else 0)))
        except EnginehouseError as error:
            return describe(error)
        return None


def connection_of(scope: Scope) -> Reservation | None:
    """Return the reservation of a request's connection; None on Windows, where another protocol class runs."""
    return cast(Reservation | None, scope.get(CONNECTION_KEY))


def memory_of(scope: Scope) -> Reservation:
    """Return the reservation of a request, which is closed when its response has ended."""
    return cast(Reservation, scope[_REQUEST_KEY])  # type: ignore[literal-required]


def _counted(receive: Receive, body: Reservation, scope: HTTPScope) -> Receive:
    """Wrap ``receive`` to count the body of a request, from reading until the request has ended."""
    connection = connection_of(scope)

    async def receive_counted() -> Any:
        message = await receive()
        if num_bytes := len(message.get("body", b"")):  # type: ignore[arg-type]
            if connection is not None:
                connection.give_back(num_bytes)
            body.take(num_bytes)
        return message

    return receive_counted


class _Hosts:
    """Allowed Host headers."""

    def __init__(self, bound: str, allowed: tuple[str, ...]) -> None:
        self._allowed = {name.lower() for name in (bound, *allowed)}
        # On a wildcard address every address of this machine is "the bind address". Addresses cannot be
        # rebound by DNS, so all are allowed; names must be listed.
        self._any_address = _is_wildcard(bound)
        self._any = "*" in allowed

    def check(self, scope: HTTPScope) -> ErrorAnswer | None:
        """Return the refusal, or None."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if not values and scope["http_version"] == "1.0":
            return None  # predates Host; no browser, which a foreign name could direct here, uses it
        if len(values) != 1:
            return http_error(400, "The request needs exactly one Host header.")
        host = host_name(values[0].decode("latin-1"))
        if self._any or host in self._allowed or is_loopback(host) or (self._any_address and _is_address(host)):
            return None
        shown = f"{host[:_MAX_SHOWN_CHARS]!r}"
        message = f"This server does not answer for the Host {shown}; add it to server.allowed_hosts where it should."
        return http_error(403, message, "host_not_allowed")


def _note_request_id(scope: HTTPScope) -> ErrorAnswer | None:
    """Store the id that the client sent; return the refusal if it is invalid."""
    try:
        record_of(scope).request_id = sent_request_id(scope["headers"])
    except InvalidRequest as error:
        return describe(error)
    return None


def _note_trace(record: AccessRecord, headers: Headers) -> None:
    """Store the trace context of the request; its consumer validates it."""
    if traceparent := headers.get(b"traceparent"):
        record.traceparent = traceparent[:_MAX_TRACE_BYTES].decode("latin-1")
        record.tracestate = headers.get(b"tracestate", b"")[:_MAX_TRACE_BYTES].decode("latin-1") or None


def _no_key() -> ErrorAnswer:
    message = "A valid API key is needed: 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
    return http_error(401, message, www_authenticate="Bearer")


def _check_content_type(scope: HTTPScope, headers: Headers) -> ErrorAnswer | None:
    """Refuse POSTs that are not JSON: a web page can send other types without a preflight.

    Surfaces whose clients name no type or a wrong one take any, except from web pages, which send their Origin.
    """
    if scope["method"] != "POST":
        return None
    surface = _surface_of(scope)
    takes_any = surface is not None and surface.takes_any_type and b"origin" not in headers
    if b"content-type" not in headers and headers.get(b"content-length", b"0") == b"0" and not _is_chunked(headers):
        return None  # no body, no type; the route decides if a body is required
    content_type = b"application/json" if takes_any else headers.get(b"content-type", b"")
    kind, _, parameters = content_type.decode("latin-1").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if kind.strip() != "application/json" or (charset is not None and charset[1] not in ("utf-8", "utf8")):
        return http_error(415, "The request body must be JSON in UTF-8, with 'Content-Type: application/json'.")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        # Nothing is decompressed: a few kilobytes could become gigabytes.
        return http_error(415, "The request body must not be compressed: leave Content-Encoding out.")
    if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
        return http_error(415, "The request body must not be compressed: Transfer-Encoding may only be 'chunked'.")
    return None


def _surface_of(scope: Any) -> Surface | None:
    """Return the surface that the address of a request belongs to."""
    found: Surface | None = scope.get(_SURFACE_KEY)
    return found


def _is_chunked(headers: Headers) -> bool:
    return b"transfer-encoding" in headers


def _head_only(send: Send) -> Send:
    """Wrap ``send`` to send only status and headers of a GET response; the application then sees a disconnect."""
    is_sent = False

    async def send_head(message: Message) -> None:
        nonlocal is_sent
        if is_sent:
            return
        await send(message)
        if message["type"] == "http.response.start":
            is_sent = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def _request_ids(scope: HTTPScope) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers with the request's id: the server's, and that of the surface if it has another name for it."""
    request_id = record_of(scope).identify().encode()
    yield REQUEST_ID_HEADER, request_id
    surface = _surface_of(scope)
    if surface is not None and surface.request_id_header is not None:
        yield surface.request_id_header.lower().encode("latin-1"), request_id


async def _send_error(send: Send, answer: ErrorAnswer, scope: HTTPScope) -> None:
    status, headers, body = await written_error(answer, scope)
    fields = [*headers, ("content-length", str(len(body)))]
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host in ("", "*") or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
