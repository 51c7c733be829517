"""How log lines look: for people, or one JSON object per line for programs that collect them."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

__all__ = ["JsonFormatter", "formatter_for"]


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time``, ``level``, ``logger`` and ``message``.

    A line of the access log has ``request`` with its fields, in the place of ``message``; an exception adds
    ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = getattr(record, "access", None)
        if request is not None:
            line["request"] = {name: _rounded(value) for name, value in request.items()}
        else:
            line["message"] = _encodable(record.getMessage())
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


def formatter_for(log_format: Literal["text", "json"]) -> logging.Formatter:
    """The formatter of that name."""
    return JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return _encodable(value) if isinstance(value, str) else value


def _encodable(text: str) -> str:
    """Addresses and messages may hold lone surrogates, which JSON in UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
