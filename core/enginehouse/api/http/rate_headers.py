"""What is left of a caller's rates, in the headers that OpenAI's clients know: ``x-ratelimit-*``."""

from __future__ import annotations

import math

from enginehouse.api.http.admission import RateState, Ticket

__all__ = ["RATE_HEADERS", "rate_headers"]

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""Every header that may come."""


def rate_headers(ticket: Ticket) -> list[tuple[bytes, bytes]]:
    """The headers of an answer; none where no rate holds."""
    return [(name.encode(), value.encode()) for state in ticket.states for name, value in _shown(state)]


def _shown(state: RateState) -> list[tuple[str, str]]:
    unit = state.rate.unit
    return [
        (f"x-ratelimit-limit-{unit}", str(state.rate.per_minute)),
        (f"x-ratelimit-remaining-{unit}", str(state.remaining)),
        (f"x-ratelimit-reset-{unit}", _span(state.reset_s)),
    ]


def _span(seconds: float) -> str:
    """As OpenAI writes it: ``6m0s``, ``2s``, ``20ms``."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
