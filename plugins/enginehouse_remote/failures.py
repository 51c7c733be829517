"""What a server's failure is called here: which one is the client's, which one another server may make good.

A refusal of the request stays a refusal with its field. Everything that says more about the server than about the
request is :class:`ServerFailed`, which the engine answers by asking another server.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeGuard

import httpx
import msgspec

from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
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
    """This server cannot serve the request now. ``final`` is what the client is told when no other one can."""

    def __init__(self, final: EnginehouseError, *, is_down: bool) -> None:
        super().__init__(final.message)
        self.final = final
        self.is_down = is_down


def of_exception(error: httpx.HTTPError | httpx.InvalidURL, url: str) -> ServerFailed:
    """A connection that failed, broke or took too long."""
    if isinstance(error, AnswerUnreadable):
        return ServerFailed(GenerationFailed(f"The server {url} cannot be read: {error}."), is_down=False)
    said = str(error)[:_MAX_DETAIL_CHARS]  # the library quotes what it could not read
    what = "did not answer in time" if isinstance(error, httpx.TimeoutException) else "cannot be reached"
    if isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
        what = "closed the connection"
    detail = f": {said}" if said else ""
    # A slow answer may be a long prompt: it says nothing about the next request.
    is_down = not isinstance(error, httpx.ReadTimeout)
    return ServerFailed(EngineDead(f"The server {url} {what}{detail}."), is_down=is_down)


def of_response(status: int, body: bytes, url: str, retry_after: str | None = None) -> EnginehouseError | ServerFailed:
    """An answer that is no 200: an error for the client, or :class:`ServerFailed`."""
    return _of_error(status, _error_object(body), body[:500].decode("utf-8", "replace"), url, retry_after)


def of_stream(data: Any, url: str) -> EnginehouseError | ServerFailed:
    """An error object inside a stream, whose status was 200 already."""
    error = data if isinstance(data, dict) else {"message": str(data)}
    status = error.get("code") if isinstance(error.get("code"), int) else error.get("status")
    return _of_error(status if isinstance(status, int) and 400 <= status < 600 else 500, error, "", url)


def _of_error(
    status: int, error: dict[str, Any], text: str, url: str, retry_after: str | None = None
) -> EnginehouseError | ServerFailed:
    """The error for a status and what was said about it; ``text`` is the beginning of a body without a message."""
    message = str(error.get("message") or text or f"status {status}")[:_MAX_MESSAGE_CHARS]
    if status in _REFUSALS:
        return _refusal(error, message)
    said = f"The server {url} answered {status}: {message}"
    if status == 429:
        said = f"The server behind this model has too much to do: {message}"
        return ServerFailed(Overloaded(said, retry_after_s=_seconds(retry_after)), is_down=False)
    if status in (401, 403):
        return ServerFailed(GenerationFailed(f"{said} (it does not take the API key of the settings)"), is_down=False)
    if status < 500 and status != 408:
        return ServerFailed(GenerationFailed(said), is_down=False)
    return ServerFailed(EngineDead(said), is_down=status in (502, 503, 504))


def _seconds(retry_after: str | None) -> float:
    """What a server asks for, at most an hour; a date or anything else is a second."""
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
    """Whether it is a number of tokens, and not one that cannot be told on."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS


def _number(text: str, *patterns: re.Pattern[str]) -> int | None:
    """What the first pattern that is found says."""
    found = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    return int(found[1]) if found is not None and len(found[1]) <= _MAX_DIGITS else None


def _error_object(body: bytes) -> dict[str, Any]:
    """The error object of an answer in one of its usual places; empty without one."""
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
