"""A server in a separate process, started as users start it, for tests and examples.

Knows the command line and ``/health`` only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

__all__ = ["ServerProcess", "started_server"]

_URL = re.compile(r"listening on ((?:https?://|unix:)[^\s\"]+)")
_POLL_S = 0.02


@define(eq=False)
class ServerProcess:
    """A running ``enginehouse serve``.

    Attributes:
        process: gives process id and exit code; still running when the ``with`` block begins.
        lines: output so far, standard output and error together.
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(factory=list)

    @property
    def url(self) -> str | None:
        """``http://host:port``; None until the port is open."""
        return next((found[1] for line in self.lines if (found := _URL.search(line))), None)

    @property
    def output(self) -> str:
        """All output so far."""
        return "".join(self.lines)

    def is_ready(self) -> bool:
        """Return True if ``/health`` returns 200."""
        if self.url is None:
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_s: float = 15.0) -> int:
        """Stop it (SIGTERM) and return its exit code; it is killed after the timeout."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def read(self) -> None:
        """Collect output until the process ends; runs in a thread, so that a full pipe never blocks the server."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


@contextmanager
def started_server(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ready_timeout_s: float = 120.0,
) -> Iterator[ServerProcess]:
    """Run ``enginehouse serve`` with ``arguments`` on a free port; ready when the block begins, stopped after it.

    Raises:
        RuntimeError: it ended or was not ready in time; the message contains its output.
    """
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd
    ) as process:
        server = ServerProcess(process)
        reader = threading.Thread(target=server.read, daemon=True)
        reader.start()
        try:
            deadline = time.monotonic() + ready_timeout_s
            while not server.is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server is not ready:\n{server.output}")
                time.sleep(_POLL_S)
            yield server
        finally:
            server.stop()
            reader.join()
