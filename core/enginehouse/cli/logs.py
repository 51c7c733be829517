"""Log output of a running server: plain text, or one JSON object per line; compatible with progress bars."""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from rich.console import Console

__all__ = ["JsonFormatter", "drop_unwritable", "formatter_for", "write_logs"]


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: ``time``, ``level``, ``logger`` and ``message``.

    A line of the access log has ``request`` with its fields instead of ``message``; an exception adds ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without line ending."""
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
    """Return the formatter of that name."""
    return JsonFormatter() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return _encodable(value) if isinstance(value, str) else value


def _encodable(text: str) -> str:
    """Replace lone surrogates, which URLs and messages may contain but JSON in UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class _ConsoleHandler(logging.Handler):
    """Writes lines unchanged; while a progress bar is shown they appear above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            line = self.format(record)
            if self._console.is_terminal:
                self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            else:  # 20 times faster; there is no progress bar to preserve
                self._console.file.write(line + "\n")
                self._console.file.flush()
        except Exception:  # noqa: BLE001 - logging boundary: a closed terminal must not end a request
            self.handleError(record)


def write_logs(console: Console, level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send the log lines of this process to ``console``; those of other packages only from ``warning`` on."""
    handler = _ConsoleHandler(console)
    handler.setFormatter(formatter_for(log_format))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("enginehouse").setLevel(level.upper())


def drop_unwritable() -> None:
    """Discard output that cannot be written (a full disk); otherwise Python would retry at exit and return code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
