"""The backend ``fake-fleet``: workers of this machine that play the part of workers elsewhere.

They are real processes over the real protocol, connected through this process instead of a network. Tests take them
away and add others through ``FakePlacement.open``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.contract.engine import Engine, Placement
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.fleet import Fleet, WorkerLink
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.types import EngineRequest
from enginehouse_backendkit.shared_worker import ServerLink, SharedWorker

__all__ = ["FakeFleetBackend", "FakeFleetOptions", "FakePlacement"]


@frozen(kw_only=True)
class FakeFleetOptions:
    """Settings of the backend: the inner backend, and the number of workers at the start."""

    inner: str | None = None
    replicas: int = field(default=2, validator=ge(0))


class FakePlacement:
    """The workers of one model; see :class:`enginehouse.contract.fleet.PlacedWorkers`.

    Attributes:
        open: all placements that are not closed, by the name of their model.
        workers: the workers by place; a test may end their processes.
    """

    open: ClassVar[dict[str, FakePlacement]] = {}

    def __init__(self, model: str, load: bytes, fleet: Fleet) -> None:
        self.workers: dict[str, SharedWorker] = {}
        self._links: dict[str, WorkerLink] = {}
        self._model = model
        self._load = load
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self.open[model] = self

    async def add(self) -> str:
        """Start a worker and connect it; returns its place."""
        place = f"replica-{next(self._numbers)}"
        worker = self.workers[place] = SharedWorker(self._load)
        await worker.open()
        self.connect(place)
        return place

    def connect(self, place: str) -> None:
        """Connect the server with a worker that runs, again if the last link was lost."""
        link = self.workers[place].link()

        async def send(data: bytes) -> None:
            link.feed(data)

        frames = link.frames()
        server_link = self._fleet.join(place, send, lambda: None)
        self._links[place] = server_link
        task = asyncio.get_running_loop().create_task(self._carry(frames, link, server_link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, frames: AsyncIterator[bytes], link: ServerLink, server_link: WorkerLink) -> None:
        try:
            async for data in frames:
                server_link.feed(data)
        finally:
            link.drop()
        server_link.end("has ended")

    def lose(self, place: str) -> None:
        """Break the link, as if the machine had gone; the worker lives on."""
        self._links.pop(place).end("is gone with its machine")

    async def remove(self, place: str) -> None:
        """Take a worker away: its requests move to the others, then it ends."""
        self.lose(place)
        await self.workers.pop(place).close()

    def choose(self, request: EngineRequest, loads: Mapping[str, int]) -> Placement:
        """Choose the least busy worker."""
        return Placement(replica=min(loads, key=loads.__getitem__), reason="load")

    async def close(self) -> None:
        """End all workers."""
        self.open.pop(self._model, None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))


class FakeFleetBackend:
    """The backend; implements :class:`enginehouse.contract.fleet.PlacesWorkers`."""

    name = "fake-fleet"
    api_version = API_VERSION
    options: type[Any] = FakeFleetOptions
    opens: Literal["workers"] = "workers"

    def probe(self) -> Probe:
        """See the contract."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """See the contract."""
        return Match(0.0, "it is used only if it is named")

    def estimate(self, source: ModelSource, options: FakeFleetOptions) -> MemoryEstimate:
        """See the contract."""
        return MemoryEstimate(0, 0, 0)

    def open(self, source: ModelSource, options: FakeFleetOptions, progress: Progress) -> Engine:
        """See the contract."""
        raise ModelLoadError("the backend 'fake-fleet' places workers; it opens no model itself")

    async def place(
        self, model: str, load: bytes, options: FakeFleetOptions, fleet: Fleet, progress: Progress
    ) -> FakePlacement:
        """See the contract."""
        placement = FakePlacement(model, load, fleet)
        for _ in range(options.replicas):
            await placement.add()
        return placement
