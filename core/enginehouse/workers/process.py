"""The server's end of a child process: its start, the connection to it, and its exit status.

Used for workers (``launch``) and for the processes that render chat templates. No process outlives the server: it exits
when its link ends (see ``ipc``), even if the server was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
from attrs import frozen

from enginehouse.plugins.call_notes import CallNotes
from enginehouse.workers.ipc import MAX_FRAME_BYTES, FrameCutter, FrameTooLarge, socket_pair

_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")

# File descriptor of stderr: output that a library prints must not go to the server's stdout.
_STDERR = 2

_READ_BYTES = 256 * 1024

_COUNTS = Path("/proc/vmstat")


@frozen
class ExitStatus:
    """The end of a child process, or of a worker thread.

    Attributes:
        text: description of what happened, as in "process exited with code 1".
        is_from_outside: True if it was killed neither by this server nor by a system that was out of memory.
    """

    text: str
    is_from_outside: bool = False


def exit_status(returncode: int, num_memory_kills: int | None = None, *, is_own: bool = False) -> ExitStatus:
    """Return the exit status of a process.

    Args:
        returncode: as ``subprocess`` gives it; a negative value is a signal.
        num_memory_kills: number of processes that the system has killed because it was out of memory since this one was
            started; None if unknown.
        is_own: True if this server killed it.
    """
    if returncode >= 0:
        return ExitStatus(f"process exited with code {returncode}")
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    text = f"process was ended by {name}"
    if name != "SIGKILL":
        return ExitStatus(text)
    if num_memory_kills == 0:
        return ExitStatus(f"{text} (killed by someone; the system was not out of memory)", is_from_outside=not is_own)
    return ExitStatus(f"{text} (out of memory, or killed by someone)")


def count_memory_kills() -> int | None:
    """Return the number of out-of-memory kills since the system started, containers included; None if unknown."""
    try:
        for line in _COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):  # not Linux
        pass
    return None


class ChildProcess:
    """A process at the other end of a socket pair, in its own process group, so that Ctrl-C reaches only the server.

    Must be created on the event loop's thread, which lives as long as the server: Linux ties the process to it.

    Args:
        command: program and arguments; the file descriptor of the process's end is appended.
        environment: its environment variables; None passes those of this process on.
        own_session: Linux schedules sessions against each other, so a worker gets a share of its own; a process that
            answers the server within microseconds answers faster in the server's session.
        shared: further file descriptors that the process inherits.

    Attributes:
        socket: the server's end; a :class:`Connection` takes ownership of it.
        ended: the exit status; done as soon as the process has ended. Wait for it with ``asyncio.wait``.
        notes: what the process notes for the server; set by its owner.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        own_session: bool = True,
        shared: tuple[int, ...] = (),
    ) -> None:
        self._num_memory_kills = count_memory_kills()
        self._is_killed = False
        self.socket, theirs = socket_pair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self.socket.close)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *shared),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env=environment,
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )
            undo.pop_all()
        self.pid = self._process.pid
        self.notes: CallNotes | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        # A thread in waitpid costs nothing and, unlike child watchers, works on every event loop.
        try:
            threading.Thread(target=self._wait, name="process exit", daemon=True).start()
        except RuntimeError as error:  # no further thread may be started
            self._process.kill()
            self._process.wait()
            self.socket.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def _wait(self) -> None:
        returncode, before, now = self._process.wait(), self._num_memory_kills, count_memory_kills()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it started and left running may hold its memory
        num_memory_kills = now - before if now is not None and before is not None else None
        status = exit_status(returncode, num_memory_kills, is_own=self._is_killed)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so the result is not needed
            self._loop.call_soon_threadsafe(self.ended.set_result, status)

    def dump_threads(self) -> None:
        """Ask the process to write the tracebacks of its threads to the log, which a hanging one can still do."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR2)

    def kill(self) -> None:
        """Kill the process and all processes in its group."""
        if not self.ended.done():
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Connection(asyncio.Protocol, Generic[_Sent, _Received]):
    """The server's end of a link. Call :meth:`open`; the event loop calls ``connection_*`` and ``data_*``.

    Args:
        pack: returns the frame of a message.
        unpack: returns the message of a payload; raises msgspec.DecodeError if it is not valid.
        on_message: called with each message of the process.
        on_lost: called once when the link ends, with the reason if the process violated the protocol.
        max_frame_bytes: maximum size of a message of the process.
    """

    def __init__(
        self,
        pack: Callable[[_Sent], bytes],
        unpack: Callable[[memoryview], _Received],
        on_message: Callable[[_Received], None],
        on_lost: Callable[[str | None], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._on_message = on_message
        self._on_lost = on_lost
        self._cutter = FrameCutter(max_frame_bytes)
        self._reason: str | None = None
        self._transport: asyncio.Transport | None = None
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self._rest: socket.socket | None = None  # duplicate of the socket, which stays readable after a failed write

    async def open(self, sock: socket.socket) -> None:
        """Take ownership of the socket; it is closed if this fails."""
        loop = asyncio.get_running_loop()
        self._rest = sock.dup()
        connect: Callable[..., Any] = loop.create_unix_connection if os.name == "posix" else loop.create_connection
        with contextlib.ExitStack() as undo:
            undo.callback(self._rest.close)
            undo.callback(sock.close)
            await connect(lambda: self, sock=sock)
            undo.pop_all()

    @property
    def is_open(self) -> bool:
        """True if messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        """Number of buffered bytes that the process has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: _Sent) -> None:
        """Send a message; it is dropped if the link is lost, which ``on_lost`` reports.

        Raises the errors of ``pack``.
        """
        data = self._pack(message)
        if self.is_open:
            cast(asyncio.Transport, self._transport).write(data)

    async def drained(self) -> None:
        """Wait until most of what was sent has been read, or the link is lost."""
        await self._is_drained.wait()

    def abort(self) -> None:
        """Close the link immediately."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """Note that the process does not keep up."""
        self._is_drained.clear()

    def resume_writing(self) -> None:
        """Note that it does again."""
        self._is_drained.set()

    def data_received(self, data: bytes) -> None:
        """Split and decode the received bytes."""
        try:
            for payload in self._cutter.feed(data):
                self._on_message(self._unpack(payload))
        except (FrameTooLarge, msgspec.DecodeError) as error:
            self._reason = f"the process sent something that is not a message: {error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss after reading the last messages; a failed write ends the link before that."""
        assert self._rest is not None
        self._is_drained.set()
        if exc is not None:
            with contextlib.suppress(OSError):  # nothing more to read
                while self._reason is None and (data := self._rest.recv(_READ_BYTES)):
                    self.data_received(data)
        self._rest.close()
        self._on_lost(self._reason)
