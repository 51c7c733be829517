"""Work items of a model with several workers elsewhere: each enters one of them, and another one when that dies.

What a worker was working on when it died is quarantined item by item, see :class:`FleetQuarantine`; all other work goes
on in all workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from enginehouse.contract.errors import EngineDead, ModelLoadError, ModelNotReady, ModelUnloaded
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.quarantine import Event, HeldWork, excuse, margin_tokens, move
from enginehouse.recovery.work import Offences, State, Work
from enginehouse.serving.served import LoadedModel, ServedModel
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.fleet import FleetEngine

_CHECK_S = 1.0
"""Seconds between checks whether the model is still served, while it has no worker."""


class FleetQuarantine(HeldWork):
    """Finds the work item that kills workers: one that was there at the deaths of two, the second in its isolation run.

    What a worker did when it died is quarantined, item by item: each returns to a worker without another isolation run,
    not to the one that died if there is another, beside other work. If that worker dies as well, the tested item is the
    culprit, because everything else there was at no other death; what is well past the point of the death is cleared.

    Args:
        offences: offences of callers.
    """

    def __init__(self, offences: Offences) -> None:
        super().__init__()
        self._offences = offences
        self._tested: dict[str, tuple[Work, int]] = {}  # by place, with the goal

    @property
    def is_active(self) -> bool:
        """True if items are tested."""
        return bool(self._tested)

    def avoided(self, work: Work) -> frozenset[str]:
        """Return the places that an item must not enter now: those with another isolation run."""
        return frozenset(self._tested) if work.state is State.QUARANTINED else frozenset()

    def entered(self, work: Work, place: str) -> None:
        """The item enters a worker."""
        self._inside[work] = None
        move(work, Event.ENTERED)
        if work.state is State.ISOLATED:
            self._tested[place] = work, work.num_tokens + margin_tokens(work.num_quarantines)

    def progressed(self, work: Work) -> None:
        """The item has made progress."""
        for place, (tested, goal) in tuple(self._tested.items()):
            if tested is work and work.num_tokens >= goal:
                del self._tested[place]
                move(work, Event.PASSED)

    def died(self, held: Sequence[Work], causes: Sequence[Work], place: str, *, from_outside: bool) -> Work | None:
        """A worker died; returns the culprit if it is known.

        Args:
            held: all that it held.
            causes: what it was working on.
            place: its name.
            from_outside: it was killed, or its machine is gone.
        """
        blamed = [work for work in causes if not (from_outside and excuse(work))]
        tested, _ = self._tested.pop(place, (None, 0))
        culprit = tested if tested in blamed else None
        for work in held:
            self._inside.pop(work, None)
            if work is culprit:
                move(work, Event.DIED)
                self._offences.add(work.caller)
            elif work.state in (State.RUNNING, State.ISOLATED):
                self._lose(work, place, is_blamed=work in blamed and culprit is None)
        return culprit

    def _lose(self, work: Work, place: str, *, is_blamed: bool) -> None:
        move(work, Event.DIED if is_blamed else Event.LOST)
        if is_blamed:
            work.num_quarantines += 1
            work.died_at = place
        if work.is_over:
            self._end(work)

    def _end(self, work: Work) -> None:
        for place, (tested, _) in tuple(self._tested.items()):
            if tested is work:
                del self._tested[place]
        if work.state not in (State.ENDED, State.CULPRIT):
            move(work, Event.ENDED)


class FleetWork(ModelWork):
    """Work items of one model with several workers. Used on the event loop.

    Args:
        served: the model.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served)
        self._tests = FleetQuarantine(self._offences)
        self._fleet: FleetEngine | None = None

    @property
    def has_quarantined(self) -> bool:
        """True if items are tested."""
        return self._tests.is_active

    def _is_held_back(self, work: Work) -> bool:
        has_worker = self._fleet is None or bool(self._fleet.members)
        return not has_worker or self._pause_s(work) > 0

    def _meet(self, model: LoadedModel) -> None:
        if isinstance(model.engine, FleetEngine):
            self._fleet = model.engine

    async def worker_for(self, work: Work) -> WorkerEngine:
        """Wait until a work item may enter a worker, as in :class:`ModelWork`."""
        while True:
            if work.refusal is not None:
                raise work.refusal
            if (pause_s := self._pause_s(work)) > 0:
                await self._await_change(work, pause_s)
            elif (engine := self._choose(work)) is None:
                self._wait_outside(work)  # counted, so that a worker is started for it
                work.start_limit()
                await self._await_worker()
            else:
                self._know(engine)
                self._tests.entered(work, engine.place)
                if not work.request.request_id:
                    self._leave_queue(work)
                work.engine, work.stage = engine, "waiting"
                return engine

    def _choose(self, work: Work) -> WorkerEngine | None:
        if self._fleet is None:
            return None
        avoided = self._tests.avoided(work)
        engine, placement = self._fleet.choose(work.request, avoided | {work.died_at})
        if engine is None:
            engine, placement = self._fleet.choose(work.request, avoided)
        work.placement = placement
        return engine

    async def _await_worker(self) -> None:
        """Wait until another worker may take the item, or the model is opened again."""
        served, before = self._served(), self._fleet
        waits = [self._changed, *(() if before is None else (before.changed,))]
        if served is None:
            raise EngineDead("The model stopped working, and is not served any more.")
        try:
            self._meet(await served.restarted())
        except (ModelLoadError, ModelNotReady, ModelUnloaded) as error:
            raise EngineDead(f"The model stopped working and could not be started again: {error.message}") from error
        if self._fleet is before:
            await asyncio.wait(waits, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)

    def progressed(self, work: Work) -> None:
        """A work item has made progress while others are tested."""
        self._tests.progressed(work)
        self._notify()

    def over(self, work: Work) -> None:
        """The client expects nothing more; a worker may still hold the item."""
        self._tests.over(work)
        self._forget_if_outside(work)
        self._notify()

    def _note_left(self, work: Work) -> None:
        self._tests.left(work)

    def _find_culprit(self, engine: WorkerEngine, held: list[Work], causes: list[Work]) -> Work | None:
        return self._tests.died(held, causes, engine.place, from_outside=engine.is_killed_from_outside)
