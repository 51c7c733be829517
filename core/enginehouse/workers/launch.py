"""Starts the host of a worker, in a process or in a thread of the server, or connects one elsewhere; checks its Hello.

The link to a worker elsewhere is carried by a plugin (:mod:`enginehouse.contract.fleet`). The server's side of it is a
socket pair, like that of a worker on this machine: ``client`` sees no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import cast

from enginehouse.contract.errors import ModelLoadError, PluginFailed, ResourcesExhausted
from enginehouse.plugins import Guard
from enginehouse.plugins.call_notes import CallNotes
from enginehouse.workers.ipc import Link, socket_pair
from enginehouse.workers.messages import Hello, own_hello
from enginehouse.workers.process import ChildProcess, ExitStatus

__all__ = ["RemoteWorker", "Worker", "WorkerThread", "check_hello", "explain", "start_worker", "worker_command"]

_log = logging.getLogger("enginehouse.workers")


class RemoteWorker(asyncio.Protocol):
    """Implements :class:`enginehouse.contract.fleet.WorkerLink`, and what ``client`` needs of a worker.

    Its end is from outside: a request that ends a model ends the worker process there, whose last message says so.

    Args:
        place: name of the replica.
        send: sends bytes to the worker.
        on_end: called once, when the link is closed.
        guard: that of the plugin, around ``send``.

    Attributes:
        socket: the server's end.
        ended: done when the worker is gone, or the server has closed its end.
    """

    def __init__(
        self, place: str, send: Callable[[bytes], Awaitable[None]], on_end: Callable[[], None], guard: Guard
    ) -> None:
        self.place = place
        self.pid: int | None = None
        self.notes: CallNotes | None = None
        self.socket, self._theirs = socket_pair()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._send = send
        self._on_end = on_end
        self._guard = guard
        self._unsent = bytearray()
        self._has_unsent = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._sending: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to carry bytes."""
        await self._loop.create_unix_connection(lambda: self, sock=self._theirs)
        self._sending = self._loop.create_task(self._send_all(), name=f"link with {self.place}")

    def feed(self, data: bytes) -> None:
        """See the contract."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end(self, reason: str) -> None:
        """See the contract."""
        if not self.ended.done():
            self.ended.set_result(ExitStatus(reason, is_from_outside=True))
            if self._sending is not None:
                self._sending.cancel()
            if self._transport is not None:
                self._transport.close()
            else:
                self._theirs.close()
            self._on_end()

    def dump_threads(self) -> None:
        """Do nothing: its threads are another machine's."""

    def kill(self) -> None:
        """Leave the worker, which drops what this server has asked for."""
        self.end("was left")

    # -- the end of the socket pair ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Keep bytes of the server until the last ones are sent."""
        self._unsent += data
        self._has_unsent.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed its end."""
        self.end("was left")

    async def _send_all(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            data, self._unsent = bytes(self._unsent), bytearray()
            try:
                with self._guard.calling("send of its link", passes=(), is_noted=False):
                    await self._send(data)
            except PluginFailed as error:
                cause = error.__cause__ or error
                self.end(f"cannot be reached ({type(cause).__name__}: {cause})")
                return


# The GNU C library gives each thread a heap of its own, where freed memory stays in fragments. With at most two heaps,
# more of it returns to the system after large constraints; one heap made decode steps slower in most measurements.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "2"}

# Errors that mean a temporary shortage of resources.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS)


def start_worker(isolation: str, python: str | None) -> Worker:
    """Start a host that waits for its Load message; must be called on the event loop's thread.

    Raises:
        ModelLoadError: the process cannot be started; ResourcesExhausted if the reason is a shortage of resources.
    """
    try:
        if isolation == "thread":
            return WorkerThread()
        if os.name != "posix":
            raise ModelLoadError("worker processes need Linux or macOS; set isolation = 'thread'")
        return _start_process(worker_command(python))
    except OSError as error:
        kind = ResourcesExhausted if error.errno in _SHORTAGES else ModelLoadError
        raise kind(f"the worker {isolation} could not be started: {error}") from error


def _start_process(command: list[str]) -> ChildProcess:
    environment = _ALLOCATOR | dict(os.environ)
    try:
        notes = CallNotes()
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        # Files of any size are forbidden: the worker runs, only plugins that end it stay unnamed.
        _log.warning("calls into plugins are not noted: %s", error)
        return ChildProcess(command, environment)
    with contextlib.ExitStack() as undo:
        undo.callback(notes.close)
        worker = ChildProcess([*command, str(notes.descriptor)], environment, shared=(notes.descriptor,))
        undo.pop_all()
    worker.notes = notes
    return worker


def worker_command(python: str | None) -> list[str]:
    """Return the command line of a worker process, without the descriptors of its notes and of its end of the link.

    Args:
        python: interpreter of the environment to run in; None is the current one.
    """
    # -P: the current folder may hold files that are named like modules.
    return [python or sys.executable, "-P", "-m", "enginehouse.workers"]


class WorkerThread:
    """The host in a daemon thread. It cannot be killed: a running forward pass always completes."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.notes: CallNotes | None = None
        self.socket, self._theirs = socket_pair()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _run(self) -> None:
        from enginehouse.workers.host import WorkerHost  # noqa: PLC0415 - the engine, which a server rarely runs itself

        text = "thread crashed"
        try:
            WorkerHost(Link(self._theirs)).run()
            text = "thread ended"
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.ended.set_result, ExitStatus(text))

    def dump_threads(self) -> None:
        """Do nothing: its threads are the server's."""

    def kill(self) -> None:
        """Do nothing: the client closes the link next, which asks the thread to end."""


Worker = ChildProcess | WorkerThread | RemoteWorker
"""A running host: ``socket`` is the server's end of its link, ``ended`` its exit status, ``pid`` None for a thread."""


# Time limit for finding out why an interpreter does not become a worker.
_EXPLAIN_S = 20.0

# Must run on Pythons that are too old for enginehouse; the current folder may hold files named like modules.
_QUESTION = """
import json, sys
sys.path[:] = [path for path in sys.path if path]
try:
    import enginehouse.workers.host
    problem = ""
except BaseException as error:
    problem = "%s: %s" % (type(error).__name__, error)
print(json.dumps([sys.version.split()[0], problem]))
"""


def check_hello(theirs: Hello, path: str) -> None:
    """Refuse a worker with another protocol or version.

    Args:
        path: dotted path of the setting that chose the worker's Python.

    Raises:
        ModelLoadError: names what to install, and in which environment.
    """
    ours = own_hello()
    if theirs.protocol == ours.protocol and theirs.version == ours.version:
        return
    raise ModelLoadError(
        f"{path}: the environment {theirs.prefix} (Python {theirs.python}) has enginehouse {theirs.version} (protocol "
        f"{theirs.protocol}), but this server is enginehouse {ours.version} (protocol {ours.protocol}); run: "
        f"{theirs.prefix}/bin/python -m pip install 'enginehouse=={ours.version}'"
    )


async def explain(python: str, path: str, reason: str) -> ModelLoadError:
    """Return an error that explains why an interpreter ended before it sent Hello.

    Args:
        python: the interpreter.
        path: dotted path of the setting that chose it.
        reason: description of how its process ended.
    """
    try:
        asked = await asyncio.to_thread(_ask, python)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ModelLoadError(f"{path}: {python} did not become a worker: {reason}")
    its_version, problem = asked
    if problem:
        said = f"Python {its_version} cannot import enginehouse ({problem})"
        hint = f"; run: {python} -m pip install 'enginehouse=={own_hello().version}'"
        return ModelLoadError(f"{path}: {python} did not become a worker: {said}{hint}")
    return ModelLoadError(f"{path}: {python} (Python {its_version}) did not become a worker: {reason}")


def _ask(python: str) -> tuple[str, str]:
    """Return the interpreter's version and the error of importing enginehouse; ValueError on any other output."""
    answer = subprocess.run([python, "-c", _QUESTION], capture_output=True, timeout=_EXPLAIN_S, check=True, text=True)
    its_version, problem = json.loads(answer.stdout)
    return str(its_version), str(problem)
