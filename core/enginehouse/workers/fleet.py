"""An engine with several workers elsewhere, which a plugin places and connects (:mod:`enginehouse.contract.fleet`).

Each is a :class:`WorkerEngine` over a link that the plugin carries. Recovery asks for a worker for each request; calls
without recovery go to any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from enginehouse.contract.engine import EngineStream, Placement
from enginehouse.contract.errors import EngineDead, EnginehouseError, WorkerDied
from enginehouse.contract.fleet import PlacedWorkers
from enginehouse.contract.inspection import EngineMetrics, EngineView
from enginehouse.contract.types import (
    EngineRequest,
    EngineStats,
    ModelInfo,
    PoolingRequest,
    PoolingResult,
    Segment,
)
from enginehouse.plugins import Guard
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Load
from enginehouse.workers.remote import RemoteWorker
from enginehouse.workers.request_queue import RequestQueue

__all__ = ["FleetEngine"]

_log = logging.getLogger(__name__)

_NONE = "The model has no replica at the moment; try again in a moment."


class FleetEngine:
    """The workers of one model. Implements :class:`enginehouse.contract.fleet.Fleet`, and the contract of engines.

    Args:
        load: the first message for each worker.
        request_queue: the queue of the model.
        guard: that of the backend, around its transport.
        step_timeout_s: as for a worker on this machine; a worker whose step takes longer is left.

    Attributes:
        info: information about the model, from the first worker; later ones must agree with it.
        died: the reason, once there will be no workers any more.
        placement: the placed workers, once they are placed.
        members: the workers that serve, by place.
        changed: done when a worker has become a member or is gone; then there is a new one.
    """

    info: ModelInfo

    def __init__(self, load: Load, request_queue: RequestQueue, guard: Guard, *, step_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._load = load
        self._step_timeout_s = step_timeout_s
        self._guard = guard
        self.request_queue = request_queue
        self.died: asyncio.Future[EngineDead] = self._loop.create_future()
        self.placement: PlacedWorkers | None = None
        self.members: dict[str, WorkerEngine] = {}
        self._failure: EnginehouseError | None = None  # of the last worker that did not become a member
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed: asyncio.Future[None] = self._loop.create_future()
        self._gone_metrics = EngineMetrics()

    # -- members -----------------------------------------------------------------------------------

    def join(self, place: str, send: Callable[[bytes], Awaitable[None]], on_end: Callable[[], None]) -> RemoteWorker:
        """See the contract."""
        worker = RemoteWorker(place, send, on_end, self._guard)
        task = self._loop.create_task(self._reach(worker), name=f"replica {place}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return worker

    async def _reach(self, worker: RemoteWorker) -> None:
        """Connect with a worker, and stay with it until it is gone."""
        try:
            await worker.open()
            engine = await WorkerEngine.open(
                self._load,
                isolation="process",
                python=None,
                on_progress=lambda share, text: None,
                request_queue=self.request_queue,
                step_timeout_s=self._step_timeout_s,
                remote=worker,
            )
        except EnginehouseError as error:
            worker.end(error.message)
            self._failure = error
            _log.warning("replica %s: %s", worker.place, error.message)
            self._notify()
            return
        try:
            if not hasattr(self, "info"):
                self.info = engine.info
            if engine.info != self.info:
                _log.error("replica %s: its model is not that of the other replicas; it is not used", worker.place)
                return
            self.members[worker.place] = engine
            self._notify()
            reason = (await asyncio.shield(engine.died)).message
            _log.warning("replica %s: %s", worker.place, reason)
        finally:
            if self.members.get(worker.place) is engine:
                del self.members[worker.place]
                self._gone_metrics = self._gone_metrics + engine.metrics
            await engine.close()
            self._notify()

    def end(self, reason: str) -> None:
        """See the contract."""
        if not self.died.done():
            self.died.set_result(EngineDead(reason))

    async def loaded(self) -> None:
        """Wait for the first member.

        Raises:
            EnginehouseError: the first worker says why it cannot load the model.
        """
        while not self.members:
            if self._failure is not None:
                raise self._failure
            await asyncio.wait([self.changed])

    @property
    def num_requests(self) -> int:
        """See the contract."""
        return len(self.request_queue)

    def _notify(self) -> None:
        changed, self.changed = self.changed, self._loop.create_future()
        changed.set_result(None)

    def choose(
        self, request: EngineRequest, avoid: Collection[str] = ()
    ) -> tuple[WorkerEngine, Placement] | tuple[None, None]:
        """Return the worker for a request, and why it is that one; None if there is none now.

        Args:
            request: the request; a call has no id.
            avoid: places that must not get it.
        """
        loads = {one.place: one.num_open for one in self.members.values() if one.is_open and one.place not in avoid}
        if not loads or self.placement is None:
            return None, None
        placement = self.placement.choose(request, loads)
        return self.members[placement.replica], placement

    def _any(self) -> WorkerEngine:
        """Return the least busy worker, for work that is not recovered."""
        engine, _ = self.choose(EngineRequest(request_id=""))
        if engine is None:
            raise WorkerDied(_NONE)
        return engine

    # -- contract of engines -----------------------------------------------------------------------

    @property
    def metrics(self) -> EngineMetrics:
        """Sum of the counters of all workers."""
        return sum((one.metrics for one in self.members.values()), self._gone_metrics)

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Queue a request; see the contract."""
        return await self._any().submit(request)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Return the rows of a request; see the contract."""
        return await self._any().pool(request)

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Return the token ids of a prompt; see the contract."""
        return await self._any().tokenize(segments, add_special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; see the contract."""
        return await self._any().detokenize(token_ids)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token id; see the contract."""
        return await self._any().pieces(token_ids)

    async def stats(self) -> EngineStats:
        """Return the statistics of the least busy worker."""
        return await self._any().stats()

    async def view(self) -> EngineView:
        """Return a snapshot of the least busy worker."""
        return await self._any().view()

    async def cached_tokens(self, token_ids: Sequence[int], namespace: str) -> int:
        """Return how much of a prompt the least busy worker holds."""
        return await self._any().cached_tokens(token_ids, namespace)

    async def stop_thinking(self, request_id: str) -> int:
        """Force the end of a request's reasoning, in the worker that holds it."""
        for one in tuple(self.members.values()):
            if num_choices := await one.stop_thinking(request_id):
                return num_choices
        return 0

    async def close(self) -> None:
        """Leave all workers, and stop those that belong to this server alone."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if self.placement is not None:
            placement, self.placement = self.placement, None
            await placement.close()
