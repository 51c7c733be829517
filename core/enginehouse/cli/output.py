"""Output of a starting and running server: the log as text or JSON lines, progress bars, and a curl example."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec
from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn


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


@frozen(eq=False)
class _Terminal:
    """The stream of a console: lines are written unchanged, and appear above a progress bar."""

    console: Console

    def write(self, text: str) -> None:
        """Write whole lines."""
        self.console.print(text, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def flush(self) -> None:
        """Do nothing: they are written at once."""


def write_logs(console: Console, level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send the log lines of this process to ``console``; those of other packages only from ``warning`` on."""
    # A file is written directly, which is 20 times faster.
    handler = logging.StreamHandler[Any](_Terminal(console) if console.is_terminal else console.file)
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


class Startup:
    """Shows the load progress of the models. Its methods may be called from any thread."""

    def __init__(self, console: Console, models: Iterable[str], *, has_page: bool = False) -> None:
        self._console = console
        self._has_page = has_page
        self._lock = threading.Lock()
        self._url = ""
        self._waiting = dict.fromkeys(models)
        self._progress = Progress(
            TextColumn("Loading {task.fields[model]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Startup:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def on_listening(self, url: str) -> None:
        """Called when the port is open; models may still be loading. The URL is shown by the server's own log line."""
        self._url = url

    def on_progress(self, model: str, share: float, text: str) -> None:
        """Report that ``model`` has loaded ``share`` (0 to 1) of itself.

        The texts ``ready``, ``ready for`` a task, ``failed``, and ``unloaded`` (for a postponed load) end the load.
        """
        with self._lock:
            outcome, _, task = text.partition(" for ")
            if outcome in ("ready", "failed", "unloaded"):
                self._end(model, outcome, task)
            elif model in self._waiting:
                if model not in self._bars:
                    self._bars[model] = self._progress.add_task(text, total=1.0, model=model)
                self._progress.update(self._bars[model], completed=share, description=text)

    def _end(self, model: str, outcome: str, task: str) -> None:
        if model not in self._waiting:  # a restart, long after the start
            return
        del self._waiting[model]
        if model in self._bars:
            self._progress.remove_task(self._bars.pop(model))
        if not self._waiting:
            self._stop()
        if outcome == "ready":
            at = self._url if self._url.startswith("unix:") else f"{self._url}/v1"
            example = f" Try it:\n\n{_curl_example(self._url, model, task)}\n" if self._console.is_terminal else ""
            self._say(f"{model} is ready at {at}.{example}")
            if self._has_page and self._console.is_terminal and not self._url.startswith("unix:"):
                self._has_page = False  # said once
                self._say(f"Or open {self._url}/ in a browser.\n")

    def _stop(self) -> None:
        with contextlib.suppress(OSError):  # a failed write (a full disk) must not stop the server
            self._progress.stop()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


_QUESTION = "Name the capital of France."
_EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": ("chat/completions", {"temperature": 0, "messages": [{"role": "user", "content": _QUESTION}]}),
    "embed": ("embeddings", {"input": _QUESTION}),
    "rerank": ("rerank", {"query": _QUESTION, "documents": ["Berlin is in Germany.", "Paris is its capital."]}),
    "classify": ("classify", {"input": _QUESTION}),
}
"""Address and body of an example by task; "" is generating text."""


def _curl_example(url: str, model: str, task: str) -> str:
    address, fields = _EXAMPLES[task]
    body = shlex.quote(json.dumps({"model": model, **fields}, ensure_ascii=False))
    if url.startswith("unix:"):
        url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    return f"  curl {url}/v1/{address} -H 'Content-Type: application/json' \\\n    -d {body}"
