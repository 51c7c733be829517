"""Errors on the wire: maps exceptions to HTTP statuses and :class:`~enginehouse.contract.surface.ErrorAnswer` values.

Every refusal and failure of the server passes through here. The body is that of the surface of the address, else
OpenAI's ``{"error": {"message", "type", "param", "code"}}``. Does not know any routes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import Any

from attrs import evolve
from litestar.exceptions import HTTPException

from enginehouse.contract.errors import (
    AdapterNotFound,
    AdapterRefused,
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    FirstTokenTimeout,
    GenerationFailed,
    InsufficientMemory,
    InvalidRequest,
    ModelConflict,
    ModelLoadError,
    ModelNotFound,
    ModelNotReady,
    ModelOverloaded,
    ModelTooLarge,
    ModelUnloaded,
    Overloaded,
    PluginFailed,
    QueueTimeout,
    RateLimited,
    ReloadFailed,
    ReloadRefused,
    RenderError,
    RequestCancelled,
    RequestError,
    RequestKillsWorker,
    ServerOverloaded,
    ServerStopping,
    SourceNotAllowed,
    SourceNotFound,
    TotalTimeout,
    UnsupportedParameter,
    UnsupportedTask,
)
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.settings.profiles import Profile


class AuthenticatorFailed(EnginehouseError):
    """A plugin that identifies callers failed or took too long; the same credentials may be accepted later."""

    def __init__(self, plugin: str) -> None:
        super().__init__(f"The plugin {plugin!r}, which identifies callers, cannot answer at the moment; try again.")


class BodyTooLarge(EnginehouseError):
    """The body is longer than ``limits.max_body_bytes``."""

    @classmethod
    def of(cls, max_bytes: int) -> BodyTooLarge:
        """Create the error for a body of more than ``max_bytes`` bytes."""
        return cls(f"The request body is longer than {max_bytes} bytes (limits.max_body_bytes).")


class ClientLeft(EnginehouseError):
    """The client closed the connection before its request was complete, so the response is not read."""


class RequestNotRunning(EnginehouseError):
    """No request with that id is running."""


class NotThinking(EnginehouseError):
    """The request has no open reasoning to close."""


class MissingScope(EnginehouseError):
    """The key is valid but lacks the required scope."""

    def __init__(self, needed: str, granted: Iterable[str]) -> None:
        super().__init__(f"This needs a key with the scope {needed!r}; the given one has {', '.join(granted)}.")
        self.needed = needed


class NotLocal(EnginehouseError):
    """A management request on a server without keys that may not come from the server's own machine.

    Args:
        sign: the evidence for that.
    """

    def __init__(self, sign: str) -> None:
        super().__init__(
            "Without API keys this server is managed only by direct requests from its own machine to a loopback "
            f"address. This request is refused because {sign}. Set auth.key_file (enginehouse keys add) and send a key "
            "with the scope 'admin'."
        )


_log = logging.getLogger("enginehouse.server")

# Most specific first: status, type, code.
_KINDS: tuple[tuple[type[EnginehouseError], int, str, str], ...] = (
    (UnsupportedParameter, 400, "invalid_request_error", "unsupported_parameter"),
    (UnsupportedTask, 400, "invalid_request_error", "unsupported_task"),
    (ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (RenderError, 400, "invalid_request_error", "template_error"),
    (ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (AdapterNotFound, 404, "invalid_request_error", "adapter_not_found"),
    (AdapterRefused, 400, "invalid_request_error", "adapter_refused"),
    (SourceNotAllowed, 403, "invalid_request_error", "source_not_allowed"),
    (SourceNotFound, 404, "invalid_request_error", "source_not_found"),
    (ReloadRefused, 400, "invalid_request_error", "invalid_configuration"),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (RequestError, 400, "invalid_request_error", "invalid_request"),
    (AuthenticatorFailed, 503, "server_error", "authenticator_failed"),
    (MissingScope, 403, "invalid_request_error", "insufficient_scope"),
    (NotLocal, 403, "invalid_request_error", "insufficient_scope"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (RequestCancelled, 410, "cancelled_error", "request_cancelled"),
    (NotThinking, 409, "invalid_request_error", "not_thinking"),
    (RequestNotRunning, 404, "invalid_request_error", "request_not_running"),
    (ClientLeft, 400, "invalid_request_error", "cancelled"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (ModelOverloaded, 503, "overloaded_error", "model_overloaded"),
    (ServerOverloaded, 503, "overloaded_error", "server_overloaded"),
    (Overloaded, 429, "overloaded_error", "queue_full"),
    (QueueTimeout, 503, "timeout_error", "queue_timeout"),
    (FirstTokenTimeout, 504, "timeout_error", "first_token_timeout"),
    (TotalTimeout, 504, "timeout_error", "total_timeout"),
    (ServerStopping, 503, "server_error", "server_stopping"),
    (ModelConflict, 409, "invalid_request_error", "conflict"),
    (ModelNotReady, 503, "server_error", "model_not_ready"),
    (ModelUnloaded, 503, "server_error", "model_unloaded"),
    (ModelTooLarge, 507, "server_error", "model_too_large"),
    (InsufficientMemory, 503, "server_error", "insufficient_memory"),
    (ModelLoadError, 503, "server_error", "model_load_failed"),
    (EngineDead, 503, "server_error", "engine_dead"),
    # Clients retry 5xx automatically, which would crash two more workers.
    (RequestKillsWorker, 422, "invalid_request_error", "request_kills_worker"),
    (ReloadFailed, 500, "server_error", "reload_failed"),
    (PluginFailed, 500, "server_error", "plugin_failed"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
    (EnginehouseError, 500, "server_error", "internal_error"),
)

_MAX_RETRY_AFTER_S = 86400.0

_HTTP_CODES = {
    400: "bad_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
    431: "headers_too_large",
}


def for_client(answer: ErrorAnswer, profile: Profile) -> ErrorAnswer:
    """Return an error with the code that ``profile`` uses for it, and a message that can be encoded."""
    # A message may quote anything that a client sent; a lone surrogate would not encode.
    message = answer.message.encode("utf-8", "replace").decode()
    return evolve(answer, message=message, code=profile.error_codes.get(answer.status, answer.code))


def error_body(answer: ErrorAnswer) -> dict[str, Any]:
    """Return OpenAI's error object, which is also that of addresses that belong to no surface."""
    error = {"message": answer.message, "type": answer.kind, "param": answer.param, "code": answer.code}
    return {"error": error}


def http_error(status: int, message: str, code: str | None = None, **headers: str) -> ErrorAnswer:
    """Return an HTTP-level error (wrong method, missing key); keyword names become headers, ``_`` to ``-``."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return ErrorAnswer(status, message, kind, code or _HTTP_CODES.get(status, "error"), headers=fields)


def describe(error: BaseException, request_id: str = "-", *, shows_details: bool = False) -> ErrorAnswer:
    """Return the client's description of ``error``; details not meant for callers are logged instead.

    Args:
        request_id: of the response; identifies the request in the log and in the message.
        shows_details: True if the caller manages the server and may see the details.
    """
    if isinstance(error, HTTPException) and error.status_code < 500:
        return _describe_http(error)
    if not isinstance(error, EnginehouseError):
        _log.error("request %s failed", request_id, exc_info=error)
        return ErrorAnswer(500, _with_id("The server failed.", request_id), "server_error", "internal_error")
    status, kind, code = next((status, kind, code) for cls, status, kind, code in _KINDS if isinstance(error, cls))
    message = error.message
    if isinstance(error, PluginFailed):
        _log.error("request %s failed: %s", request_id, _on_one_line(message))
        message = _with_id(message, request_id)
    elif error.generic is not None and not shows_details:
        _log.error("request %s failed: %s: %s", request_id, type(error).__name__, _on_one_line(message))
        message = _with_id(error.generic, request_id)
    return ErrorAnswer(status, message, kind, code, getattr(error, "param", None), _retry_headers(error, status))


def _with_id(message: str, request_id: str) -> str:
    return f"{message} The server's log says more about request {request_id}."


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _retry_headers(error: EnginehouseError, status: int) -> tuple[tuple[str, str], ...]:
    if status not in (429, 503):
        return ()
    seconds = float(getattr(error, "retry_after_s", 1.0))
    # Wait times may come from other servers, and may be infinite.
    seconds = min(seconds, _MAX_RETRY_AFTER_S) if seconds > 0 else 1.0
    return (("retry-after", str(max(1, math.ceil(seconds)))),)


_NO_ADDRESS = "There is nothing at this address. Check the path; OpenAI clients need a base URL that ends in /v1."


def _describe_http(error: HTTPException) -> ErrorAnswer:
    """Describe errors raised by Litestar itself: routing, body size, broken clients."""
    message = _NO_ADDRESS if error.status_code == 404 else error.detail
    headers: dict[str, Any] = dict(error.headers or {})
    if error.status_code == 405:
        allowed = {*_allowed(headers), "OPTIONS"}
        message = f"This address does not take that method, only {' and '.join(sorted(allowed - {'OPTIONS'}))}."
        headers = {"allow": ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))}
    answer = http_error(error.status_code, message)
    return ErrorAnswer(answer.status, answer.message, answer.kind, answer.code, None, tuple(headers.items()))


def _allowed(headers: dict[str, Any]) -> list[str]:
    listed = next((value for name, value in headers.items() if name.lower() == "allow"), "")
    return [method.strip() for method in listed.split(",") if method.strip()]
