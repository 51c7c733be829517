"""The requests of one model, across all its workers: who is in, who must wait, and what becomes of them at a death."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from collections.abc import Sequence
from functools import partial

from enginehouse.engine.worker import WorkerEngine
from enginehouse.errors import EngineDead, ModelLoadError, ModelNotReady, ModelUnloaded, Overloaded, RequestKillsWorker
from enginehouse.models.served import LoadedModel, ServedModel
from enginehouse.replay.generation import ReplayedGeneration
from enginehouse.replay.poison import Poison
from enginehouse.replay.probation import Probation
from enginehouse.types import EngineRequest

__all__ = ["ModelHome"]

_log = logging.getLogger(__name__)

# Between two looks at a model of which it is known that its worker has died and not yet that it is restarted.
_RETRY_S = 0.05


class ModelHome:
    """Implements :class:`enginehouse.replay.generation.Home`. Lives on the event loop.

    Args:
        served: the model.
        max_waiting: requests that may wait outside while suspects are on trial.
    """

    def __init__(self, served: ServedModel, max_waiting: int) -> None:
        self._served = weakref.ref(served)  # whose end is this one's
        self._name = served.name
        self._max_waiting = max_waiting
        self._probation = Probation()
        self._poison = Poison(time.monotonic)
        self._requests: dict[ReplayedGeneration, None] = {}  # in order of arrival
        self._engine: WorkerEngine | None = None
        self._arrivals = itertools.count()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def submit(self, model: LoadedModel, request: EngineRequest) -> ReplayedGeneration:
        """Bring a new request to the model.

        Raises:
            RequestKillsWorker: workers died of it before.
            Overloaded: too many wait already.
            EnginehouseError: see :meth:`ReplayedGeneration.enter`.
        """
        if request in self._poison:
            raise RequestKillsWorker("The model's worker has died of this very request before; it is refused.")
        if self.is_suspicious and sum(held.engine is None for held in self._requests) >= self._max_waiting:
            raise Overloaded("The model is recovering from a crash, and too many requests wait for it; try again.")
        if isinstance(model.engine, WorkerEngine) and model.engine.is_open:
            self._know(model.engine)
        generation = ReplayedGeneration(request, self, next(self._arrivals), model.settings.replay_timeout_s)
        self._requests[generation] = None
        try:
            await generation.enter()
        except BaseException:
            generation.cancel()
            raise
        return generation

    @property
    def is_suspicious(self) -> bool:
        """Whether a request of this model is on trial."""
        return self._probation.trial is not None

    async def admission(self, request: ReplayedGeneration) -> WorkerEngine:
        """Wait until a request may enter the worker; returns the worker, which lives.

        Raises:
            EngineDead: there will be none.
        """
        while True:
            while not self._probation.admits(request):
                request.start_limit()
                await asyncio.shield(self._changed)
            if self._engine is not None and self._engine.is_open:
                return self._engine
            request.start_limit()
            await self._await_engine()

    async def _await_engine(self) -> None:
        served = self._served()
        if served is None:
            raise EngineDead("The model stopped working, and is not served any more.")
        try:
            model = await served.restarted()
        except (ModelLoadError, ModelNotReady, ModelUnloaded) as error:
            raise EngineDead(f"The model stopped working and could not be started again: {error.message}") from error
        if isinstance(model.engine, WorkerEngine) and model.engine.is_open:
            self._know(model.engine)
        else:
            await asyncio.sleep(_RETRY_S)

    def _know(self, engine: WorkerEngine) -> None:
        if engine is not self._engine:
            self._engine = engine
            engine.died.add_done_callback(partial(self._on_died, engine))

    async def burial(self, engine: WorkerEngine) -> None:
        """Wait until the death of a worker is known, and what it means for its requests."""
        await asyncio.shield(engine.died)
        await asyncio.sleep(0)

    def _on_died(self, engine: WorkerEngine, died: asyncio.Future[EngineDead]) -> None:
        if not died.cancelled():
            self._died(engine, died.result())

    def _died(self, engine: WorkerEngine, error: EngineDead) -> None:
        """A worker has died by itself: find suspects, and send everything that it held on its way to the next one."""
        held = [request for request in self._requests if request.engine is engine]
        from_outside = engine.is_killed_from_outside
        culprit = self._probation.died(_working(held, self._probation), from_outside=from_outside)
        if held:
            _log.warning("model %s: %s; %d requests will go on in the next worker", self._name, error, len(held))
        if isinstance(culprit, ReplayedGeneration):
            _log.error("model %s: its worker died twice of the same request, which is refused", self._name)
            culprit.refuse(RequestKillsWorker(_verdict(error)))
            self._poison.add(culprit.request)
        for request in held:
            request.lost()
        self._notify()

    def progressed(self, request: ReplayedGeneration) -> None:
        """A request has come further while there are suspects."""
        if self._probation.progressed(request):
            # Not at once: this is in the middle of a step, and what the rest of the step says is not to be lost.
            asyncio.get_running_loop().call_soon(self._let_step_aside, request, request.engine)
        self._notify()

    def _let_step_aside(self, request: ReplayedGeneration, engine: WorkerEngine | None) -> None:
        if request in self._requests and request.engine is engine:
            request.step_aside()

    def left(self, request: ReplayedGeneration) -> None:
        """A request has ended, in whatever way."""
        if request in self._requests:
            del self._requests[request]
            self._probation.left(request)
            self._notify()

    def _notify(self) -> None:
        """Let everybody who waits look again, the first first."""
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


def _working(held: Sequence[ReplayedGeneration], probation: Probation) -> list[ReplayedGeneration]:
    """What the worker can have died of: what it computed, and the next request in each line before that.

    Requests that were queued had nothing to do with it. On trial, a request is alone, and it was the cause.
    """
    if probation.trial in held:
        return [request for request in held if request is probation.trial]
    working = [request for request in held if request.stage == "running"]
    for stage in ("submitted", "accepted"):
        working += [request for request in held if request.stage == stage][:1]
    return working


def _verdict(error: EngineDead) -> str:
    return (
        f"The model's worker died twice while it worked on this request ({error.message}), the second time on nothing "
        "else. The request is refused; please do not send it again."
    )
