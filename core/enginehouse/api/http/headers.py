"""Headers of every response: the request id and the caller's remaining rates."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable

from enginehouse.api.http.admission import RateState, Ticket
from enginehouse.contract.errors import InvalidRequest

__all__ = ["RATE_HEADERS", "REQUEST_ID_HEADER", "new_request_id", "rate_headers", "sent_request_id"]

REQUEST_ID_HEADER = b"x-request-id"

_WORD = re.compile(rb"[A-Za-z0-9._~:+=@-]{1,128}")


def new_request_id() -> str:
    """Return a new id, for a request whose client sent none and whose response body has no id."""
    return f"req-{uuid.uuid4().hex}"


def sent_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the id that the client sent, or None.

    Raises:
        InvalidRequest: it is not a word of 1 to 128 letters, digits and ``._~:+=@-``, or there are several.
    """
    values = [value for name, value in headers if name == REQUEST_ID_HEADER]
    if not values:
        return None
    if len(values) > 1 or not _WORD.fullmatch(values[0]):
        message = "X-Request-Id: must be one word of 1 to 128 letters, digits and ._~:+=@-"
        raise InvalidRequest(message, "X-Request-Id")
    return values[0].decode("ascii")


RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""All rate-limit headers that a response may have."""


def rate_headers(ticket: Ticket) -> list[tuple[bytes, bytes]]:
    """Return the rate-limit headers of a response; empty if no rate applies."""
    return [(name.encode(), value.encode()) for state in ticket.states for name, value in _shown(state)]


def _shown(state: RateState) -> list[tuple[str, str]]:
    unit = state.rate.unit
    return [
        (f"x-ratelimit-limit-{unit}", str(state.rate.per_minute)),
        (f"x-ratelimit-remaining-{unit}", str(state.remaining)),
        (f"x-ratelimit-reset-{unit}", _span(state.reset_s)),
    ]


def _span(seconds: float) -> str:
    """Format a duration as OpenAI does: ``6m0s``, ``2s``, ``20ms``."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
