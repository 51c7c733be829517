"""Frames over a socket pair: a length (4 bytes, little-endian), then that many bytes.

The worker side blocks (:class:`Link`); the server side gets bytes from its event loop and cuts them
(:class:`FrameCutter`). What the bytes mean is the business of ``messages``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

__all__ = ["MAX_FRAME_BYTES", "FrameCutter", "FrameTooLarge", "Link", "frame", "socket_pair"]

MAX_FRAME_BYTES = 64 * 1024 * 1024

# Room for many steps' events, so that a step does not wait for a server that is busy for some milliseconds.
_BUFFER_BYTES = 1024 * 1024

_LENGTH = struct.Struct("<I")


class FrameTooLarge(ValueError):
    """A frame exceeds ``MAX_FRAME_BYTES``."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a frame of {num_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        self.num_bytes = num_bytes


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets: the server's end and the worker's end."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ours, theirs


def frame(payload: bytes) -> bytes:
    """The payload with its length in front. Raises FrameTooLarge."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(payload))
    return _LENGTH.pack(len(payload)) + payload


class Link:
    """The worker's end. One thread receives; any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def receive(self) -> bytearray | None:
        """The next payload; None when the server closed its end or is gone.

        Raises:
            FrameTooLarge: the length cannot be one of ours.
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
        """Send one payload; False when the server is gone.

        Blocks while the server does not read: a server that is stopped for a while pauses generation, and one that
        dies or closes its end wakes this up. The server never blocks on its own sends, so there is no deadlock.
        """
        data = frame(payload)
        with self._sending:
            try:
                self._sock.sendall(data)
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close this end; wakes a blocked ``receive``."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class FrameCutter:
    """Cuts a stream of bytes, as the event loop delivers it, into payloads."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The payloads that ``data`` completes; each is valid until the next one is asked for.

        Raises:
            FrameTooLarge: the length cannot be one of ours.
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
        """Whether the kept bytes hold a whole frame; checked first so that a large one is not copied per piece."""
        if len(self._rest) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._rest)
        return length > MAX_FRAME_BYTES or len(self._rest) >= _LENGTH.size + int(length)
