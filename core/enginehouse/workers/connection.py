"""The server's end of a link on the event loop: messages out, messages in, and the news that it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from enginehouse.contract.errors import InvalidRequest
from enginehouse.workers.link import FrameCutter, FrameTooLarge, frame
from enginehouse.workers.messages import FromWorker, ToWorker, decode_from_worker, encode

__all__ = ["Connection"]

_READ_BYTES = 256 * 1024


class Connection(asyncio.Protocol):
    """One link. Make one with :meth:`open`; the ``connection_*`` and ``data_*`` methods are the event loop's.

    Args:
        on_message: called with each message of the worker.
        on_lost: called once when the link ends, with the reason if the worker broke the protocol.
    """

    def __init__(self, on_message: Callable[[FromWorker], None], on_lost: Callable[[str | None], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._cutter = FrameCutter()
        self._reason: str | None = None
        self._transport: asyncio.Transport | None = None
        self._rest: socket.socket | None = None  # the same link, which stays readable when a write has failed

    async def open(self, sock: socket.socket) -> None:
        """Take the socket over, whatever comes of it."""
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
        """Whether messages can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        """What waits because the worker does not read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, message: ToWorker) -> None:
        """Send a message; dropped when the link is lost, which ``on_lost`` tells.

        Raises:
            InvalidRequest: the message holds text that is no text or a number that is too wide, or is too large.
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
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut and decode what came."""
        try:
            for payload in self._cutter.feed(data):
                self._on_message(decode_from_worker(payload))
        except (FrameTooLarge, msgspec.DecodeError) as error:
            self._reason = f"the worker sent something that is no message: {error}"
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so, after what the worker has sent last: a write that fails ends the link before that is read."""
        assert self._rest is not None
        if exc is not None:
            with contextlib.suppress(OSError):  # there is no more
                while self._reason is None and (data := self._rest.recv(_READ_BYTES)):
                    self.data_received(data)
        self._rest.close()
        self._on_lost(self._reason)
