"""Work items of one model, across all its workers: who may enter a worker, and recovery after its death."""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from functools import partial

from enginehouse.contract.errors import (
    EngineDead,
    ModelLoadError,
    ModelNotReady,
    ModelUnloaded,
    PluginFailed,
    RequestKillsWorker,
)
from enginehouse.plugins.call_notes import NotedCall
from enginehouse.recovery.quarantine import Quarantine
from enginehouse.recovery.work import Culprits, Offences, State, Work
from enginehouse.serving.served import LoadedModel, ServedModel
from enginehouse.workers.client import WorkerEngine

_log = logging.getLogger(__name__)

# Seconds between checks of a model whose worker has died and whose restart has not started yet.
_RETRY_S = 0.05

_CROWDED = "The model is recovering from a crash, and too many requests wait for it; try again."


class ModelWork:
    """Work items of one model. Used on the event loop.

    Args:
        served: the model, in whose queue the items count that are outside.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = weakref.ref(served)  # weak, because this object lives as long as the model
        self._name = served.name
        self._request_queue = served.request_queue
        clock = asyncio.get_running_loop().time
        self._offences = Offences(clock)
        self._quarantine = Quarantine(self._offences)
        self._culprits = Culprits(clock)
        self._works: dict[Work, None] = {}  # in order of arrival; includes items in a worker whose client has left
        self._engine: WorkerEngine | None = None
        self._known: weakref.WeakSet[WorkerEngine] = weakref.WeakSet()
        self._arrivals = itertools.count()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- adding and removing -----------------------------------------------------------------------

    def next_arrival(self) -> int:
        """Return the arrival number of a new work item."""
        return next(self._arrivals)

    def add(self, model: LoadedModel, work: Work) -> None:
        """Add a new work item, which will then ask for its worker.

        Raises:
            RequestKillsWorker: workers died of it before.
            PluginFailed: they died of it in a plugin of another distribution.
            Overloaded: the model's queue, or its caller's share of it, is full.
        """
        if (refusal := self._culprits.refusal(work)) is not None:
            raise refusal
        if self._is_held_back(work) and _queue_id(work) not in self._request_queue:
            self._request_queue.check(work.caller, work.request.priority, why=_CROWDED)
            self._wait_outside(work)
        self._meet(model)
        self._works[work] = None

    def _meet(self, model: LoadedModel) -> None:
        """Note the engine of a model that serves."""
        if isinstance(model.engine, WorkerEngine) and model.engine.is_open:
            self._engine = model.engine
            self._know(model.engine)

    def _is_held_back(self, work: Work) -> bool:
        return self.has_quarantined or self._pause_s(work) > 0

    def _wait_outside(self, work: Work) -> None:
        """Count an item that no worker holds in the queue."""
        self._request_queue.enter(_queue_id(work), work.caller, work.request.priority)

    def _forget(self, work: Work) -> None:
        """Remove an item that is over."""
        self._works.pop(work, None)
        self._request_queue.leave(_queue_id(work))

    def _pause_s(self, work: Work) -> float:
        """Seconds that it has to wait for its caller's offences; an answer that has started is not delayed."""
        return self._offences.pause_s(work.caller) if work.state is State.WAITING and not work.num_tokens else 0.0

    @property
    def has_quarantined(self) -> bool:
        """True if there are quarantined items."""
        return self._quarantine.is_active

    async def worker_for(self, work: Work) -> WorkerEngine:
        """Wait until a work item may enter the worker; returns the worker, which is alive and now holds the item.

        Raises:
            RequestKillsWorker: workers die of it, or have meanwhile died of an equal one.
            PluginFailed: a plugin ended its workers, or did not return.
            EngineDead: there will be no worker.
        """
        while True:
            if work.refusal is not None:
                raise work.refusal
            if not self._quarantine.may_enter(work):
                await self._await_change(work, None)
            elif (pause_s := self._pause_s(work)) > 0:
                await self._await_change(work, pause_s)
            elif self._engine is None or not self._engine.is_open:
                work.start_limit()
                await self._await_engine()
            else:
                self._quarantine.entered(work)
                if not work.request.request_id:
                    self._leave_queue(work)
                work.engine, work.stage = self._engine, "waiting"
                return self._engine

    def _leave_queue(self, work: Work) -> None:
        """A call enters a worker: calls count only outside."""
        self._request_queue.leave(_queue_id(work))

    async def _await_change(self, work: Work, timeout_s: float | None) -> None:
        work.start_limit()
        await asyncio.wait([self._changed], timeout=timeout_s)

    async def _await_engine(self) -> None:
        served = self._served()
        if served is None:
            raise EngineDead("The model stopped working, and is not served any more.")
        try:
            model = await served.restarted()
        except (ModelLoadError, ModelNotReady, ModelUnloaded) as error:
            raise EngineDead(f"The model stopped working and could not be started again: {error.message}") from error
        self._meet(model)
        if self._engine is None or not self._engine.is_open:  # it has died again, which the model does not know yet
            await asyncio.sleep(_RETRY_S)

    def progressed(self, work: Work) -> None:
        """A work item has made progress while others are quarantined."""
        if self._quarantine.progressed(work):
            # Deferred, because this is called within a step, whose remaining outputs must not be lost.
            asyncio.get_running_loop().call_soon(self._let_leave, work, work.engine)
        self._notify()

    def _let_leave(self, work: Work, engine: WorkerEngine | None) -> None:
        if not work.is_over and work.engine is engine:
            work.leave_worker()

    def over(self, work: Work) -> None:
        """The client expects nothing more; the worker may still hold the item."""
        self._quarantine.over(work)
        self._forget_if_outside(work)
        self._notify()

    def _forget_if_outside(self, work: Work) -> None:
        if work.engine is None:
            self._forget(work)

    def left(self, work: Work) -> None:
        """A live worker no longer holds the item."""
        work.engine = None
        self._note_left(work)
        if work.is_over:
            self._forget(work)
        else:
            self._wait_outside(work)
        self._notify()

    def _note_left(self, work: Work) -> None:
        self._quarantine.left(work)

    def answered(self, work: Work) -> None:
        """The item has ended by itself: with an answer, or with an error that is its result."""
        work.is_answered = True
        self.over(work)
        self.left(work)

    # -- worker deaths -----------------------------------------------------------------------------

    def _know(self, engine: WorkerEngine) -> None:
        if engine not in self._known:
            self._known.add(engine)
            engine.died.add_done_callback(partial(self._on_died, engine))

    async def death(self, engine: WorkerEngine) -> None:
        """Wait until the death of a worker is reported and its consequences for its work are decided."""
        await asyncio.shield(engine.died)
        await asyncio.sleep(0)

    def _on_died(self, engine: WorkerEngine, died: asyncio.Future[EngineDead]) -> None:
        if not died.cancelled():
            self._died(engine, died.result())

    def _died(self, engine: WorkerEngine, error: EngineDead) -> None:
        """Handle the death of a worker: quarantine what it worked on, and return all that it held to the next one."""
        held = [work for work in self._works if work.engine is engine]
        if held:
            _log.warning("model %s: %s; its requests (%d) continue in the next worker", self._name, error, len(held))
        started = [work for work in held if work.stage != "waiting"]
        # If it had started on none, the cause is among all: otherwise the model would restart without end.
        causes = started or held
        if engine.ended_by is not None:
            self._refuse_plugin(engine.ended_by, started)
            causes = []
        culprit = self._find_culprit(engine, held, causes)
        if culprit is not None:
            self._refuse(culprit, error, engine.ended_in)
        for work in held:
            work.engine = None
            if work.is_over:
                self._forget(work)
            else:
                self._wait_outside(work)
                work.lost()
        self._notify()

    def _find_culprit(self, engine: WorkerEngine, held: list[Work], causes: list[Work]) -> Work | None:
        return self._quarantine.died(causes, from_outside=engine.is_killed_from_outside)

    def _refuse_plugin(self, call: NotedCall, started: list[Work]) -> None:
        """End the request for which a plugin was called, or those that have seen two deaths in calls for several."""
        for work in started:
            work.num_plugin_deaths += 1
            if work.request.request_id == call.request_id or (not call.request_id and work.num_plugin_deaths > 1):
                work.refusal = PluginFailed(f"{_blamed(call)}.", call.plugin, call.kind)

    def _refuse(self, culprit: Work, error: EngineDead, call: NotedCall | None) -> None:
        """Refuse a culprit, and all equal work items that have not started to answer.

        Args:
            call: the call of a plugin of another distribution that ended the worker: the clients get its name.
        """
        pause_s = self._offences.pause_s(culprit.caller)
        caller = f"the caller {culprit.caller!r}" if culprit.caller else "callers without a key"
        message = "model %s: its worker died twice of the same work, which is refused; work of %s waits %.0f s"
        _log.error(message, self._name, caller, pause_s)
        if call is None:
            culprit.refusal = RequestKillsWorker(_refusal_message(error))
            self._culprits.add(culprit)
        else:
            culprit.refusal = PluginFailed(f"{_blamed(call)}, twice with this request.", call.plugin, call.kind)
            text = f"{_blamed(call)}, with an equal request; for ten minutes it is not tried again."
            self._culprits.add(culprit, partial(PluginFailed, text, call.plugin, call.kind))
        for work in self._works:
            if work.refusal is None and not work.num_tokens:
                work.refusal = self._culprits.refusal(work)

    def _notify(self) -> None:
        """Wake all waiting work items, in order of arrival."""
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


def _queue_id(work: Work) -> str:
    """Return the id of an item in the queue; a call has no request id."""
    return work.request.request_id or f"call {work.arrival}"


def _blamed(call: NotedCall) -> str:
    return f"The {call.kind} {call.name!r} of the plugin {call.plugin!r} ended the model's worker, or did not return"


def _refusal_message(error: EngineDead) -> str:
    return (
        f"The model's worker died twice while it worked on this request ({error.message}), the second time with no "
        "other work. The request is refused; please do not send it again."
    )
