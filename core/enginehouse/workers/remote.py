"""A worker elsewhere, whose link a plugin carries (:mod:`enginehouse.contract.fleet`).

The server's side of the link is a socket pair, like that of a worker on this machine: ``client`` sees no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from enginehouse.contract.errors import PluginFailed
from enginehouse.plugins import Guard
from enginehouse.plugins.call_notes import CallNotes
from enginehouse.workers.ipc import socket_pair
from enginehouse.workers.process import ExitStatus

__all__ = ["RemoteWorker"]


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
