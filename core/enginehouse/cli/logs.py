"""Where log lines go while the server runs: the terminal, without tearing the progress bar apart."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

from rich.console import Console

from enginehouse.cli.log_format import formatter_for

__all__ = ["drop_unwritable", "write_logs"]


class _ConsoleHandler(logging.Handler):
    """Writes lines as they are; while a progress bar is shown they appear above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            line = self.format(record)
            if self._console.is_terminal:
                self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            else:  # 20 times faster, and there is no progress bar to care for
                self._console.file.write(line + "\n")
                self._console.file.flush()
        except Exception:  # noqa: BLE001 - logging's own border: a closed terminal must not end a request
            self.handleError(record)


def write_logs(console: Console, level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send the log lines of this process to ``console``; other packages only from ``warning`` on."""
    handler = _ConsoleHandler(console)
    handler.setFormatter(formatter_for(log_format))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("enginehouse").setLevel(level.upper())


def drop_unwritable() -> None:
    """Let go of lines that cannot be written (a full disk), or Python would try once more and end with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
