"""Maps a server's failures to our errors, separating client errors from those that another server may avoid.

A refused request stays refused, with its field. Errors caused by the server rather than the request become
:class:`ServerFailed`, upon which the engine tries another server.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeGuard

import httpx
import msgspec

from enginehouse.contract.errors import (
    AdapterNotFound,
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
    quoted,
)
from enginehouse_remote.reading import AnswerUnreadable

__all__ = ["ServerFailed", "of_exception", "of_response", "of_stream"]

_MAX_MESSAGE_CHARS = 2000
_MAX_PARAM_CHARS = 200
_MAX_DETAIL_CHARS = 300
_MAX_DIGITS = 15
_MAX_RETRY_AFTER_S = 3600
_TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|too long|exceeds? the (available )?context", re.IGNORECASE)
_MAX_CONTEXT = re.compile(r"context (?:length|size|window|holds)\D{0,30}?(\d+)", re.IGNORECASE)
_PROMPT_PART = re.compile(r"(\d+) in the (?:messages|prompt)")
_PROMPT_TOKENS = re.compile(r"(?:has|requested|resulted in)\D{0,20}?(\d+)")
_REFUSALS = (400, 409, 413, 415, 422)


class ServerFailed(Exception):
    """This server cannot serve the request now. ``final`` is returned to the client if no other server can."""

    def __init__(self, final: EnginehouseError, *, is_down: bool) -> None:
        super().__init__(final.message)
        self.final = final
        self.is_down = is_down


def of_exception(error: httpx.HTTPError | httpx.InvalidURL, url: str) -> ServerFailed:
    """Map a connection error or timeout."""
    if isinstance(error, AnswerUnreadable):
        return ServerFailed(GenerationFailed(f"The server {url} cannot be read: {error}."), is_down=False)
    said = str(error)[:_MAX_DETAIL_CHARS]  # httpx quotes the unreadable data
    what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
        what = "closed the connection"
    detail = f": {said}" if said else ""
    # A slow answer may be due to a long prompt: it does not predict the next request.
    is_down = not isinstance(error, httpx.ReadTimeout)
    return ServerFailed(EngineDead(f"The server {url} {what}{detail}."), is_down=is_down)


def of_response(
    status: int, body: bytes, url: str, retry_after: str | None = None, adapters: str = ""
) -> EnginehouseError | ServerFailed:
    """Map a response with a status other than 200 to an error for the client or :class:`ServerFailed`.

    Args:
        adapters: names of adapters in the request; with some, 404 means that the server lacks one of them.
    """
    error = _error_object(body)
    if status == 404 and adapters and error.get("code") != "model_not_found":
        said = str(error.get("message") or f"status {status}")[:_MAX_MESSAGE_CHARS]
        message = f"The server {url} has no adapter {quoted(adapters)}: {said}"
        return ServerFailed(AdapterNotFound(message, "adapters"), is_down=False)
    return _of_error(status, error, body[:500].decode("utf-8", "replace"), url, retry_after)


def of_stream(data: Any, url: str) -> EnginehouseError | ServerFailed:
    """Map an error object inside a stream, whose status was already 200."""
    error = data if isinstance(data, dict) else {"message": str(data)}
    status = error.get("code") if isinstance(error.get("code"), int) else error.get("status")
    return _of_error(status if isinstance(status, int) and 400 <= status < 600 else 500, error, "", url)


def _of_error(
    status: int, error: dict[str, Any], text: str, url: str, retry_after: str | None = None
) -> EnginehouseError | ServerFailed:
    """Build the error for a status and its details; ``text`` is the beginning of a body without a message."""
    message = str(error.get("message") or text or f"status {status}")[:_MAX_MESSAGE_CHARS]
    if status in _REFUSALS:
        return _refusal(error, message)
    said = f"The server {url} answered {status}: {message}"
    if status == 429:
        said = f"The remote server is overloaded: {message}"
        return ServerFailed(Overloaded(said, retry_after_s=_seconds(retry_after)), is_down=False)
    if status in (401, 403):
        return ServerFailed(GenerationFailed(f"{said} (it does not take the API key of the settings)"), is_down=False)
    if status < 500 and status != 408:
        return ServerFailed(GenerationFailed(said), is_down=False)
    return ServerFailed(EngineDead(said), is_down=status in (502, 503, 504))


def _seconds(retry_after: str | None) -> float:
    """Return the requested delay, at most an hour; a date or anything else counts as one second."""
    text = (retry_after or "").strip()
    if not (text.isascii() and text.isdecimal()):
        return 1.0
    return float(min(int(text[:_MAX_DIGITS]), _MAX_RETRY_AFTER_S))


def _refusal(error: dict[str, Any], message: str) -> EnginehouseError:
    code, param = error.get("code"), error.get("param")
    param = param[:_MAX_PARAM_CHARS] if isinstance(param, str) else None
    if (
        code == "context_length_exceeded"
        or error.get("type") == "exceed_context_size_error"
        or _TOO_LONG.search(message)
    ):
        num_prompt_tokens = error.get("n_prompt_tokens") or _number(message, _PROMPT_PART, _PROMPT_TOKENS)
        max_context = error.get("n_ctx") or _number(message, _MAX_CONTEXT)
        if _is_count(num_prompt_tokens) and _is_count(max_context):
            return ContextLengthExceeded(num_prompt_tokens, max_context, param)
    if code == "unsupported_parameter":
        return UnsupportedParameter(message, param)
    return InvalidRequest(message, param)


def _is_count(value: Any) -> TypeGuard[int]:
    """True if it is a number of tokens within the reportable range."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS


def _number(text: str, *patterns: re.Pattern[str]) -> int | None:
    """Return the number captured by the first pattern that matches."""
    found = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    return int(found[1]) if found is not None and len(found[1]) <= _MAX_DIGITS else None


def _error_object(body: bytes) -> dict[str, Any]:
    """Return the error object from one of its usual places in a response, or an empty dict."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    inner = data.get("error", data.get("detail", data))
    if isinstance(inner, dict):
        return inner
    return {"message": inner if isinstance(inner, str) else json.dumps(inner)}
