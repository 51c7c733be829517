"""Link between server and worker: framed msgspec messages over a socket pair, and the handshake.

One message per step, never pickle; each frame has a length prefix and a maximum size. Does not know the meaning of
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import msgspec

from enginehouse.contract.errors import InvalidRequest, ModelLoadError
from enginehouse.workers.messages import FromWorker, Hello, ToWorker, decode_from_worker, encode

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL",
    "Connection",
    "FrameCutter",
    "FrameTooLarge",
    "Link",
    "check_hello",
    "explain",
    "frame",
    "own_hello",
    "socket_pair",
]

MAX_FRAME_BYTES = 64 * 1024 * 1024

# Space for the events of many steps, so that a step does not wait for a server that is busy for a few milliseconds.
_BUFFER_BYTES = 1024 * 1024

_LENGTH = struct.Struct("<I")


class FrameTooLarge(ValueError):
    """A frame exceeds ``MAX_FRAME_BYTES``."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a frame of {num_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        self.num_bytes = num_bytes


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected stream sockets: the server's end and the worker's end."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ours, theirs


def frame(payload: bytes) -> bytes:
    """Return the payload with its length prefix. Raises FrameTooLarge."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(payload))
    return _LENGTH.pack(len(payload)) + payload


class Link:
    """The worker's end of the link. One thread receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def receive(self) -> bytearray | None:
        """Return the next payload; None if the server closed its end or is gone.

        Raises:
            FrameTooLarge: the length exceeds the limit, so the frame cannot be valid.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise FrameTooLarge(length)
        return self._read(length)

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        try:
            while rest:
                num_read = self._sock.recv_into(rest)
                if num_read == 0:
                    return None
                rest = rest[num_read:]
        except OSError:
            return None
        return data

    def send(self, payload: bytes) -> bool:
        """Send one payload; returns False if the server is gone.

        Blocks while the server does not read: a suspended server pauses generation; a server that dies or closes its
        end unblocks this call. The server never blocks on its own sends, so there is no deadlock.
        """
        data = frame(payload)
        with self._sending:
            try:
                self._sock.sendall(data)
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close this end; unblocks ``receive``."""
        with contextlib.suppress(OSError):  # the other side has already closed
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class FrameCutter:
    """Splits the byte stream that the event loop delivers into payloads."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Yield the payloads that ``data`` completes; each is valid until the next one is requested.

        Raises:
            FrameTooLarge: the length exceeds the limit, so the frame cannot be valid.
        """
        if self._rest:
            self._rest += data
            data = bytes(self._rest) if self._is_complete() else b""
            if not data:
                return
            self._rest.clear()
        view, start, end = memoryview(data), 0, len(data)
        while end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(view, start)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLarge(length)
            stop = start + _LENGTH.size + length
            if stop > end:
                break
            yield view[start + _LENGTH.size : stop]
            start = stop
        self._rest += view[start:]

    def _is_complete(self) -> bool:
        """True if the buffer holds a whole frame; checked first so that a large frame is not copied per chunk."""
        if len(self._rest) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._rest)
        return length > MAX_FRAME_BYTES or len(self._rest) >= _LENGTH.size + int(length)


_READ_BYTES = 256 * 1024


class Connection(asyncio.Protocol):
    """The server's end of a link. Create one with :meth:`open`; the event loop calls ``connection_*`` and ``data_*``.

    Args:
        on_message: called with each message of the worker.
        on_lost: called once when the link ends, with the reason if the worker violated the protocol.
    """

    def __init__(self, on_message: Callable[[FromWorker], None], on_lost: Callable[[str | None], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._cutter = FrameCutter()
        self._reason: str | None = None
        self._transport: asyncio.Transport | None = None
        self._rest: socket.socket | None = None  # duplicate of the socket, which stays readable after a failed write

    async def open(self, sock: socket.socket) -> None:
        """Take ownership of the socket; it is closed if this fails."""
        loop = asyncio.get_running_loop()
        self._rest = sock.dup()
        connect: Callable[..., Any] = loop.create_unix_connection if os.name == "posix" else loop.create_connection
        try:
            await connect(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            self._rest.close()
            raise

    @property
    def is_open(self) -> bool:
        """True if messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        """Number of buffered bytes that the worker has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: ToWorker) -> None:
        """Send a message; it is dropped if the link is lost, which ``on_lost`` reports.

        Raises:
            InvalidRequest: the message is too large, or holds a lone surrogate or a number wider than 64 bits.
        """
        try:
            data = frame(encode(message))
        except UnicodeEncodeError as error:
            raise InvalidRequest("The text holds a lone surrogate, which is not a character.", "messages") from error
        except (OverflowError, RecursionError) as error:
            reason = "The request holds a number that does not fit into 64 bits, or is nested too deeply."
            raise InvalidRequest(reason) from error
        except FrameTooLarge as error:
            raise InvalidRequest(f"The request is too large for the model's worker: {error}.", "messages") from error
        if self.is_open:
            cast(asyncio.Transport, self._transport).write(data)

    def abort(self) -> None:
        """Close the link immediately."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Split and decode the received bytes."""
        try:
            for payload in self._cutter.feed(data):
                self._on_message(decode_from_worker(payload))
        except (FrameTooLarge, msgspec.DecodeError) as error:
            self._reason = f"the worker sent something that is no message: {error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss after reading the worker's last messages; a failed write ends the link before that."""
        assert self._rest is not None
        if exc is not None:
            with contextlib.suppress(OSError):  # nothing more to read
                while self._reason is None and (data := self._rest.recv(_READ_BYTES)):
                    self.data_received(data)
        self._rest.close()
        self._on_lost(self._reason)


# Increase whenever the messages change.
PROTOCOL = 5

# Time limit for finding out why an interpreter does not become a worker.
_EXPLAIN_S = 20.0

# Must run on Pythons that are too old for enginehouse; the current folder may hold files named like modules.
_QUESTION = """
import json, sys
sys.path[:] = [path for path in sys.path if path]
try:
    import enginehouse.workers
    problem = ""
except BaseException as error:
    problem = "%s: %s" % (type(error).__name__, error)
print(json.dumps([sys.version.split()[0], problem]))
"""


def own_hello() -> Hello:
    """Return the Hello of this process."""
    try:
        own_version = version("enginehouse")
    except PackageNotFoundError:  # run from its sources
        own_version = "unknown"
    return Hello(PROTOCOL, own_version, platform.python_version(), sys.prefix)


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
