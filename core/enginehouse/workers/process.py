"""Runs a worker host in a subprocess or in a thread of the server.

Both provide the server's end of the link and report the end of the host. No process outlives the server: it exits when
the link ends (see ``__main__``), even if the server was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Protocol

from enginehouse.contract.errors import ModelLoadError, ResourcesExhausted
from enginehouse.workers.health import Ending, count_memory_kills, ending_of
from enginehouse.workers.host import WorkerHost
from enginehouse.workers.ipc import Link, socket_pair

__all__ = ["Carrier", "ProcessCarrier", "ThreadCarrier", "start_carrier", "worker_command"]

# File descriptor of stderr: output that a library prints must not go to the server's stdout.
_STDERR = 2

# The C library gives each thread a heap of its own, where freed memory stays in fragments. With one heap, memory
# returns to the system after large constraints. The hot path allocates on one thread.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1"}

# Errors that mean a temporary shortage of resources.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS)


class Carrier(Protocol):
    """A running host.

    Attributes:
        socket: the server's end of the link; the client takes ownership of it.
        ended: description of the end; done as soon as the host has ended.
        pid: the process id; None if the host is a thread.
    """

    socket: socket.socket
    ended: asyncio.Future[Ending]
    pid: int | None

    def kill(self) -> None:
        """End the host now, if that is possible."""
        ...


def start_carrier(isolation: str, python: str | None) -> Carrier:
    """Start a host that waits for its Load message; must be called on the event loop's thread.

    Raises:
        ModelLoadError: the process cannot be started; ResourcesExhausted if the reason is a shortage of resources.
    """
    try:
        return ThreadCarrier() if isolation == "thread" else ProcessCarrier(python)
    except OSError as error:
        kind = ResourcesExhausted if error.errno in _SHORTAGES else ModelLoadError
        raise kind(f"the worker {isolation} could not be started: {error}") from error


def worker_command(python: str | None, descriptor: int) -> list[str]:
    """Return the command line of a worker process.

    Args:
        python: interpreter of the environment to run in; None is the current one.
        descriptor: the inherited file descriptor of the worker's end of the link.
    """
    # -P: the current folder may hold files that are named like modules.
    return [python or sys.executable, "-P", "-m", "enginehouse.workers", "--descriptor", str(descriptor)]


class ProcessCarrier:
    """A worker process in its own session, so that Ctrl-C reaches only the server.

    Must be started on a thread that lives as long as the server, because Linux ties the process to that thread.
    """

    def __init__(self, python: str | None) -> None:
        if os.name != "posix":
            raise ModelLoadError("worker processes need Linux or macOS; set isolation = 'thread'")
        self._num_memory_kills = count_memory_kills()
        self._is_killed = False
        self.socket, self._process = _start_process(python)
        self.pid: int | None = self._process.pid
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        # A thread in waitpid costs nothing and, unlike child watchers, works on every event loop.
        threading.Thread(target=self._wait, name="worker exit", daemon=True).start()

    def _wait(self) -> None:
        returncode, before, now = self._process.wait(), self._num_memory_kills, count_memory_kills()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Processes that it started and left running may hold its memory.
            os.killpg(self._process.pid, signal.SIGKILL)
        num_memory_kills = now - before if now is not None and before is not None else None
        ending = ending_of(returncode, num_memory_kills, is_own=self._is_killed)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so the result is not needed
            self._loop.call_soon_threadsafe(_resolve, self.ended, ending)

    def kill(self) -> None:
        """Kill the process and all processes in its group."""
        if not self.ended.done():
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _start_process(python: str | None) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the server's end of the link, and the process at the other end."""
    ours, theirs = socket_pair()
    try:
        with theirs:
            process = subprocess.Popen(
                worker_command(python, theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env=_ALLOCATOR | dict(os.environ),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


class ThreadCarrier:
    """The host in a daemon thread. It cannot be killed: a running forward pass always completes."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.socket, self._theirs = socket_pair()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _run(self) -> None:
        text = "the engine thread crashed"
        try:
            WorkerHost(Link(self._theirs)).run()
            text = "the engine thread ended"
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_resolve, self.ended, Ending(text))

    def kill(self) -> None:
        """Do nothing: the client closes the link next, which asks the thread to end."""


def _resolve(future: asyncio.Future[Ending], ending: Ending) -> None:
    if not future.done():
        future.set_result(ending)
