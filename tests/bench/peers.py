"""The servers that are compared: how each is started on a model file, awaited and stopped.

One server lives at a time. A start costs a second or two, and in return no idle neighbour can spin on a
core, share a cache, or carry state from one round into the next.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

from .machine import on_cores, usable_cores

__all__ = ["Enginehouse", "LlamaCppServer", "LlamaServer", "Peer", "PeerFailed", "RunningPeer", "running"]

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 10.0
_TESTS_FOLDER = Path(__file__).parents[1]


class PeerFailed(Exception):
    """A server did not start, or died. Carries the end of what it printed."""


class Peer(Protocol):
    """A server under test."""

    @property
    def name(self) -> str:
        """How it is called in reports."""
        ...

    @property
    def ready_path(self) -> str:
        """Answers 200 once requests may be sent."""
        ...

    def command(self, port: int, folder: Path) -> list[str]:
        """The command that serves on ``port``; ``folder`` is a place for files that it needs."""
        ...


@frozen
class Enginehouse:
    """Ours. Without an isolation it runs as users run it: ``enginehouse serve FILE``."""

    model_file: Path
    isolation: str | None = None
    ready_path: str = "/health"

    @property
    def name(self) -> str:
        """``enginehouse``, with the isolation where one is asked for."""
        return f"enginehouse ({self.isolation})" if self.isolation else "enginehouse"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`Peer`."""
        serve = [sys.executable, "-m", "enginehouse", "serve"]
        if self.isolation is None:
            return [*serve, str(self.model_file), "--port", str(port)]
        config = folder / "enginehouse.toml"
        config.write_text(f'[models.bench]\nsource = "{self.model_file}"\nisolation = "{self.isolation}"\n')
        return [*serve, "--config", str(config), "--port", str(port)]


@frozen
class LlamaServer:
    """llama.cpp's own server."""

    model_file: Path
    name: str = "llama-server"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`Peer`."""
        return [sys.executable, "-m", "bench.llama_server", str(self.model_file), str(port)]


@frozen
class LlamaCppServer:
    """The server in llama-cpp-python: one request at a time; the others wait, as they must not interrupt it."""

    model_file: Path
    extra_buffers: bool = True
    name: str = "llama_cpp.server"
    ready_path: str = "/v1/models"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`Peer`."""
        num_cores = str(len(usable_cores()))
        options = {
            "--model": str(self.model_file),
            "--port": str(port),
            "--n_ctx": "8192",
            "--n_threads": num_cores,
            "--n_threads_batch": num_cores,
            "--interrupt_requests": "False",
            "--verbose": "False",
        }
        switches = [] if self.extra_buffers else ["--without-extra-buffers"]
        words = [word for pair in options.items() for word in pair]
        return [sys.executable, "-m", "bench.llama_cpp_server", *switches, *words]


@frozen
class RunningPeer:
    """A server that answers. ``process_id`` leads the group of all its processes."""

    peer_name: str
    url: str
    process_id: int

    def cpu_seconds(self) -> float:
        """CPU time that the processes of its group have used so far, in seconds."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # a process may end while we look
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process_id:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(peer: Peer, folder: Path, cores: Sequence[int] | None = None) -> Iterator[RunningPeer]:
    """Start ``peer``, wait until it is ready, stop it with all its processes at the end.

    Args:
        peer: what to start.
        folder: gets its log and files.
        cores: the only cores it may use; None is all.

    Raises:
        PeerFailed: it ended, or was not ready in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    log = folder / f"{peer.name}.log"
    with log.open("wb") as output, on_cores(cores):
        process = subprocess.Popen(
            peer.command(port, folder),
            cwd=_TESTS_FOLDER,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await_ready(process, url + peer.ready_path, log)
        yield RunningPeer(peer.name, url, process.pid)
        if process.poll() is not None:
            raise PeerFailed(_explain(process, "ended while it was driven", log))
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerFailed(_explain(process, "ended at start", log))
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5.0):
            return
        time.sleep(0.1)
    raise PeerFailed(_explain(process, f"was not ready within {_START_LIMIT_S:.0f} s", log))


def _explain(process: subprocess.Popen[bytes], what: str, log: Path) -> str:
    end = log.read_text(errors="replace")[-2000:]
    return f"`{' '.join(map(str, process.args))}` {what} (exit code {process.poll()}):\n{end}"  # type: ignore[arg-type]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask politely, then kill the whole group: a benchmark must leave no process behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
