"""A replica: the class that Ray Serve runs on the machines of the cluster. Hosts one worker, for several servers.

Takes and gives bytes only, the frames of core's workers, so that no object of ours is pickled between two versions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from enginehouse.contract.errors import EnginehouseError
from enginehouse_backendkit.shared_worker import ServerLink, SharedWorker

__all__ = ["EngineReplica"]

_log = logging.getLogger(__name__)

_AGAIN_S = 0.1

_MAX_STARTS = 3
"""Starts in a row that may fail before Ray Serve replaces the replica."""


class EngineReplica:
    """Opens the model before Ray Serve counts the replica as running.

    Args:
        load: the worker's first message.
    """

    async def __init__(self, load: bytes) -> None:  # type: ignore[misc]
        self._load = load
        self._links: dict[str, ServerLink] = {}
        self._failure = ""
        self._worker = await self._start()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _start(self) -> SharedWorker:
        worker = SharedWorker(self._load)
        await worker.open()
        await worker.ready
        return worker

    async def _watch(self) -> None:
        """Start the worker again whenever it has ended."""
        num_failed = 0
        while num_failed < _MAX_STARTS:
            reason = await self._worker.died
            _log.warning("the worker of the replica has ended and is started again: %s", reason)
            try:
                self._worker = await self._start()
                num_failed = 0
            except (EnginehouseError, OSError) as error:
                num_failed += 1
                self._failure = str(error)
        self._failure = f"the worker did not start {_MAX_STARTS} times; the last time: {self._failure}"

    async def check_health(self) -> None:
        """Raise an error if the worker cannot be started: Ray Serve then replaces the replica."""
        if self._watching.done():
            raise RuntimeError(self._failure)

    async def link(self, replica: str, key: str) -> AsyncIterator[bytes]:
        """Yield what the worker sends to one server, until the worker ends or the server leaves.

        Args:
            replica: id of this replica, for the router.
            key: name of the link, which the server has chosen.
        """
        while self._worker.died.done():  # noqa: ASYNC110 - the next worker is another object
            await asyncio.sleep(_AGAIN_S)
        self._links[key] = link = self._worker.link()
        try:
            async for data in link.frames():
                yield data
        finally:
            link.drop()
            self._links.pop(key, None)

    async def feed(self, replica: str, key: str, data: bytes) -> None:
        """Give the worker bytes of a server, whose link is open.

        Args:
            replica: as in :meth:`link`.
            key: name of the link.
            data: bytes, in order.
        """
        link = self._links.get(key)
        if link is None:
            raise RuntimeError("the link has ended")
        link.feed(data)

    async def leave(self, replica: str, key: str) -> None:
        """End a link, and what the worker does for it."""
        if (link := self._links.pop(key, None)) is not None:
            link.drop()

    def record_routing_stats(self) -> dict[str, float]:
        """Return the load of the worker, for the status of Ray Serve."""
        stats = self._worker.metrics.stats
        return {"requests": self._worker.num_requests, "free_tokens": stats.free_tokens}
