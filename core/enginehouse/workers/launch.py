"""Starts the host of a worker, in a process or in a thread of the server, and checks its Hello."""

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

from enginehouse.contract.errors import ModelLoadError, ResourcesExhausted
from enginehouse.plugins.call_notes import CallNotes
from enginehouse.workers.ipc import Link, socket_pair
from enginehouse.workers.messages import Hello, own_hello
from enginehouse.workers.process import ChildProcess, ExitStatus
from enginehouse.workers.remote import RemoteWorker

_log = logging.getLogger("enginehouse.workers")

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
