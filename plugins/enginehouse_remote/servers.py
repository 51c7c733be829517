"""Servers of one model: load balancing and health checks.

Used on the event loop by the engine. Knows URLs and counts, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import httpx
from attrs import define, field

from enginehouse_remote.options import RemoteOptions
from enginehouse_remote.reading import IDENTITY

__all__ = ["Server", "Servers"]

_log = logging.getLogger("enginehouse.remote")


@define(eq=False)
class Server:
    """One server.

    Attributes:
        url: base URL of ``/chat/completions``.
        is_up: it answered when it was last checked or used.
        num_running: number of requests running there for this model.
        num_served: total number of requests sent to it.
    """

    url: str
    is_up: bool = True
    num_running: int = 0
    num_served: int = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Count a request as running within the block."""
        self.num_running += 1
        self.num_served += 1
        try:
            yield
        finally:
            self.num_running -= 1


@define(eq=False)
class Servers:
    """All servers of one model. :meth:`start` before use, :meth:`close` afterwards."""

    urls: Sequence[str]
    headers: Mapping[str, str] = field(repr=False)
    options: RemoteOptions = field(repr=False)
    all: list[Server] = field(init=False)
    client: httpx.AsyncClient = field(init=False)
    _down: asyncio.Event = field(factory=asyncio.Event)
    _checks: asyncio.Task[None] | None = None

    def __attrs_post_init__(self) -> None:
        self.all = [Server(url) for url in self.urls]
        options = self.options
        timeout = httpx.Timeout(
            options.idle_timeout_s, connect=options.connect_timeout_s, read=options.first_token_timeout_s
        )
        # The engine limits the number of requests and reports it; a pool limit would make them wait silently.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        # Proxies and netrc of the environment are not meant for servers named in the settings.
        headers = {**self.headers, **IDENTITY}
        self.client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)

    def start(self) -> None:
        """Start the health checks of servers that are down; idempotent."""
        if self._checks is None:
            self._checks = asyncio.get_running_loop().create_task(self._watch(), name="remote health checks")

    def choose(self, tried: Collection[Server]) -> Server | None:
        """Return the least busy server not yet tried; one that is down only if no other is left."""
        left = [server for server in self.all if server not in tried]
        return min(left, key=lambda server: (not server.is_up, server.num_running, server.num_served), default=None)

    def mark_down(self, server: Server, reason: str) -> None:
        """Mark a server as down; it is checked repeatedly until it answers."""
        if server.is_up:
            _log.warning("%s: out of use until it answers again (%s)", server.url, reason)
        server.is_up = False
        self._down.set()

    def mark_up(self, server: Server) -> None:
        """Mark a server as up."""
        if not server.is_up:
            _log.info("%s: back in use", server.url)
        server.is_up = True

    async def close(self) -> None:
        """Close every connection."""
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
        await self.client.aclose()

    async def _watch(self) -> None:
        while True:
            await self._down.wait()
            await asyncio.sleep(self.options.health_interval_s)
            down = [server for server in self.all if not server.is_up]
            await asyncio.gather(*(self._check(server) for server in down))
            if all(server.is_up for server in self.all):
                self._down.clear()

    async def _check(self, server: Server) -> None:
        limit_s = self.options.connect_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self.client.stream("GET", f"{server.url}/models", timeout=limit_s) as head,
            ):
                if head.status_code < 500:  # the body is irrelevant
                    self.mark_up(server)
        except (TimeoutError, httpx.HTTPError):
            return
