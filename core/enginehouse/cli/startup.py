"""Startup output, from the command to the first request: URL, progress bars, a curl example."""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

__all__ = ["Startup"]


class Startup:
    """Shows the load progress of the models. Its methods may be called from any thread."""

    def __init__(self, console: Console, models: Iterable[str]) -> None:
        self._console = console
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

        The texts ``ready``, ``failed``, and ``unloaded`` (for a postponed load) end the load.
        """
        with self._lock:
            if text in ("ready", "failed", "unloaded"):
                self._end(model, text)
            elif model in self._waiting:
                if model not in self._bars:
                    self._bars[model] = self._progress.add_task(text, total=1.0, model=model)
                self._progress.update(self._bars[model], completed=share, description=text)

    def _end(self, model: str, outcome: str) -> None:
        if model not in self._waiting:  # a restart, long after the start
            return
        del self._waiting[model]
        if model in self._bars:
            self._progress.remove_task(self._bars.pop(model))
        if not self._waiting:
            self._stop()
        if outcome == "ready":
            at = self._url if self._url.startswith("unix:") else f"{self._url}/v1"
            self._say(f"{model} is ready at {at}. Try it:\n\n{_curl_example(self._url, model)}\n")

    def _stop(self) -> None:
        with contextlib.suppress(OSError):  # a failed write (a full disk) must not stop the server
            self._progress.stop()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _curl_example(url: str, model: str) -> str:
    question = {"role": "user", "content": "Name the capital of France."}
    body = shlex.quote(json.dumps({"model": model, "temperature": 0, "messages": [question]}, ensure_ascii=False))
    if url.startswith("unix:"):
        url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} http://localhost"
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d {body}"
