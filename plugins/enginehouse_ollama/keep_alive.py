"""``keep_alive``: how long a model stays loaded, for callers that may manage models."""

from __future__ import annotations

import re
from typing import Any

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest

__all__ = ["apply_keep_alive", "may_manage", "read_keep_alive"]


def may_manage(call: Call) -> bool:
    """Return True if the caller may load and unload models."""
    return "admin" in call.caller.scopes


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)", re.ASCII)


def read_keep_alive(value: Any) -> float | None:
    """Return a duration of Go, such as ``1h30m``, or a number of seconds.

    Raises:
        InvalidRequest: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.strip() in ("0", "-1"):
        return float(value)
    text = value if isinstance(value, str) else ""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _DURATION.findall(rest)
    if not parts or "".join(parts) != rest:
        raise InvalidRequest("keep_alive: must be a number of seconds, or a duration such as '5m'", "keep_alive")
    return sign * sum(float(part.rstrip("nuµmsh")) * _UNITS[part.lstrip("0123456789.")] for part in parts)


def apply_keep_alive(call: Call, seconds: float | None, model: str) -> None:
    """Pin the model of a request if the duration is negative; others are listed as ignored."""
    if seconds is None:
        return
    if seconds < 0 and may_manage(call):
        call.server.pin(model)
    else:
        call.ignore("keep_alive")
