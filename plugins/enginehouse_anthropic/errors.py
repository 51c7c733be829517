"""Errors in Anthropic's shape."""

from __future__ import annotations

from enginehouse.contract.surface import Chunk, ErrorAnswer

__all__ = ["OVERLOADED", "error_body", "error_status"]

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_BUSY = frozenset({"queue_timeout", "server_stopping", "model_not_ready", "model_unloaded", "insufficient_memory"})
"""Codes of other errors that a client should take for an overload: the same request will succeed later."""


def error_status(error: ErrorAnswer) -> int:
    """Return the status with which Anthropic would report an error."""
    return OVERLOADED if error.kind == "overloaded_error" or error.code in _BUSY else error.status


def error_body(error: ErrorAnswer) -> Chunk:
    """Return the body of an error, which is also the event of one that ends a stream."""
    status = error_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    described = {"type": kind, "message": error.message, "code": error.code}
    return {"type": "error", "error": described, "request_id": error.request_id}
