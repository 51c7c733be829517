"""Servers of one model: routing and health checks.

Used on the event loop by the engine. Knows URLs and counts, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import httpx
from attrs import define, field

from enginehouse.contract.engine import Placement, ReplicaStats
from enginehouse_backendkit.prefix_affinity import PrefixAffinity
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
        num_requests: requests sent to it so far, by the reason of their choice.
    """

    url: str
    is_up: bool = True
    num_running: int = 0
    num_requests: Counter[str] = field(factory=Counter)

    @property
    def name(self) -> str:
        """Host, port and path, without credentials and the usual ``/v1``."""
        parts = urlsplit(self.url)
        name = parts.netloc.rpartition("@")[2] + parts.path.removesuffix("/v1")
        return name.encode("ascii", "replace").decode()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Count a request as running within the block."""
        self.num_running += 1
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
    _affinity: PrefixAffinity = field(factory=PrefixAffinity, init=False)

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

    @property
    def uses_prefixes(self) -> bool:
        """True if the choice of a server depends on the prompt."""
        return len(self.all) > 1 and self.options.routing == "prefix"

    @property
    def stats(self) -> list[ReplicaStats]:
        """Statistics of all servers."""
        return [
            ReplicaStats(
                replica=server.name,
                is_up=server.is_up,
                num_running=server.num_running,
                num_requests=dict(server.num_requests),
            )
            for server in self.all
        ]

    def choose(self, tried: Collection[Server], blocks: Sequence[int] = ()) -> tuple[Server, Placement] | None:
        """Return a server not yet tried, and why; one that is down only if no other is left; None if all were tried.

        Args:
            blocks: of the prompt, see :func:`enginehouse_backendkit.prefix_affinity.prefix_blocks`.
        """
        left = [server for server in self.all if server not in tried]
        if not left:
            return None
        usable = [server for server in left if server.is_up] or left
        loads = [float(server.num_running) if server in usable else math.inf for server in self.all]
        choice = self._affinity.choose(blocks, loads)
        self._affinity.learn(choice.index, blocks)  # before it answers: requests that follow at once go there, too
        server, matched = self.all[choice.index], choice.matched / len(blocks) if blocks else 0.0
        server.num_requests[choice.reason] += 1
        return server, Placement(replica=server.name, reason=choice.reason, matched=matched, num_tried=len(tried))

    def mark_down(self, server: Server, reason: str) -> None:
        """Mark a server as down; it is checked repeatedly until it answers."""
        if server.is_up:
            _log.warning("%s: out of use until it answers again (%s)", server.url, reason)
        server.is_up = False
        self._affinity.forget(self.all.index(server))  # with its process, its prefix cache is probably gone
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
