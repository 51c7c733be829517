"""Frames between the server and its child processes, over a socket pair, and the child's end of it.

Child processes are the workers of models and the processes that render chat templates. Each message is one frame with a
length prefix and a maximum size, never pickle. The server's end is in ``process``. Does not know messages or the event
loop: a rendering process imports nothing else of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator

MAX_FRAME_BYTES = 64 * 1024 * 1024

# Space for the events of many steps, so that a step does not wait for a server that is busy for a few milliseconds.
_BUFFER_BYTES = 1024 * 1024

_LENGTH = struct.Struct("<I")

# prctl(2): signal sent to this process when the thread that started it ends.
_PR_SET_PDEATHSIG = 1


class FrameTooLarge(ValueError):
    """A frame exceeds its limit."""

    def __init__(self, num_bytes: int, max_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(f"a frame of {num_bytes} bytes exceeds the limit of {max_bytes}")
        self.num_bytes = num_bytes


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected stream sockets: the server's end and the child's end."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ours, theirs


def frame(payload: bytes) -> bytes:
    """Return the payload with its length prefix. Raises FrameTooLarge."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(payload))
    return _LENGTH.pack(len(payload)) + payload


class FrameCutter:
    """Splits the byte stream that the event loop delivers into payloads.

    Args:
        max_bytes: maximum size of a payload.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
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
            if length > self._max_bytes:
                raise FrameTooLarge(length, self._max_bytes)
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
        return length > self._max_bytes or len(self._rest) >= _LENGTH.size + int(length)


class Link:
    """The child's end. One thread receives; any thread may send."""

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
        end unblocks this call. The server never blocks on its own sends, so a deadlock is impossible.
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


def become_child() -> Link:
    """Prepare this process for its life as a child of the server, and return its end of the link.

    The descriptor of that end is the last argument of the command.
    """
    if sys.platform == "linux":  # a fallback for the end of the link, in case the process does not read
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Service managers signal every process of a service at once. The server decides when to end, so that streams
        # can finish. Unlike SIG_IGN, a handler is not inherited by the processes that libraries start.
        signal.signal(number, lambda *_: None)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)  # a process started here must not keep the link open
    return Link(socket.socket(fileno=descriptor))
