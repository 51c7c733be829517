"""A generation that continues across workers: the pipeline iterates and cancels it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import CacheMiss, EngineRequest, Event
from enginehouse.replay.model_work import ModelWork
from enginehouse.replay.transcript import Transcript
from enginehouse.replay.work import Work
from enginehouse.workers.generation import WorkerGeneration
from enginehouse.workers.messages import Stage

__all__ = ["ReplayedGeneration"]

# Seconds between checks of a worker that has died and whose death is not reported yet.
_RETRY_S = 0.05


class ReplayedGeneration(Work):
    """Implements ``Generation``, and is the recorder of the request in its worker.

    Args:
        request: the request to answer.
        place: the work of the model, to which this belongs.
        timeout_s: maximum time without a worker.
        written: see :class:`Work`.

    Attributes:
        num_replays: number of times that it continued in another worker.
        has_started: True if it has ever left the queue of a worker.
    """

    def __init__(self, request: EngineRequest, place: ModelWork, timeout_s: float, written: Sequence[str]) -> None:
        super().__init__(request.caller, place.next_arrival(), request, timeout_s, written)
        self.num_prompt_tokens = 0
        self.num_replays = 0
        self.has_started = False
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._transcript = Transcript(request, self._loop.time)
        self._stays: deque[WorkerGeneration] = deque()  # attempts that are still to be read
        self._last_stay: WorkerGeneration | None = None
        self._returning: asyncio.Task[None] | None = None
        self._error: EnginehouseError | None = None
        self._must_step_aside = False  # as soon as it is known to be in the worker
        self._is_cancelled = False

    # -- pipeline side -----------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over event batches, without gaps or repetition. Closing the iterator early cancels the request."""
        try:
            while not self._is_cancelled:
                while self._stays:
                    try:
                        async for events in self._stays.popleft():
                            yield events
                    except WorkerDied:
                        await asyncio.sleep(0)  # the event loop may still have to deliver the news of the death
                # While the request returns, last events may have arrived that cannot be read yet.
                if self._returning is not None:
                    await self._return_of_request(self._returning)
                elif self._error is not None:
                    raise self._error
                elif self._transcript.is_finished:
                    return
                else:
                    await asyncio.sleep(_RETRY_S)
        finally:
            self.cancel()

    async def _return_of_request(self, returning: asyncio.Task[None]) -> None:
        """Wait until the request is in a worker again, is cancelled, or cannot continue."""
        await asyncio.wait([returning])
        if self._returning is returning:
            self._returning = None
        if not returning.cancelled():
            returning.result()

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. Iteration then ends without an error."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        if self._returning is not None:
            self._returning.cancel()
        if self._last_stay is not None:
            self._last_stay.cancel()
        self._place.over(self)

    # -- entering and leaving a worker -------------------------------------------------------------

    async def enter(self, *, is_returning: bool = False) -> None:
        """Submit the request to a worker, again if that dies; returns when one has accepted it.

        Args:
            is_returning: True if it has lost its worker, so that its time limit without a worker starts now.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full.
            EngineDead: there was no worker for too long.
            RequestKillsWorker: workers die of it.
        """
        async with self.bounded(from_now=is_returning):
            await self._enter()

    async def _enter(self) -> None:
        while True:
            engine = await self._place.admission(self)
            try:
                stay = await engine.submit(self.request, resume=self._transcript.begin_stay(), recorder=self)
            except WorkerDied:
                await self._place.death(engine)
            except EnginehouseError:
                self._place.answered(self)
                raise
            else:
                self.num_replays += self._last_stay is not None
                self._last_stay = stay
                self._stays.append(stay)
                if self.is_over or (self.engine is engine and not self._must_step_aside):
                    return
                self._must_step_aside = False
                stay.detach()  # the request had to step aside, or the worker died, before this point

    def lost(self) -> None:
        """The worker has died: return to the next one, unless :meth:`enter` is already doing so."""
        if self.is_bounded:
            self.start_limit()
        else:
            self._return()

    def step_aside(self) -> None:
        """Leave the worker to other work for a while."""
        if self.is_bounded:
            self._must_step_aside = True
        else:
            assert self._last_stay is not None
            self._last_stay.detach()
            self._return()

    def _return(self) -> None:
        async def come_back() -> None:
            try:
                await self.enter(is_returning=True)
            except EnginehouseError as error:
                self._error = error
                self._place.over(self)

        self._returning = self._loop.create_task(come_back(), name=f"replay of {self.request.request_id}")

    # -- events of the worker ----------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        return self._transcript.num_tokens

    def begun(self, stage: Stage) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self.stage = stage

    def left(self) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self._place.left(self)

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet."""
        return self._last_stay.num_waiting_events if self._last_stay is not None else 0

    def accepted(self, num_prompt_tokens: int) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self.stage = "waiting"
        self.num_prompt_tokens = num_prompt_tokens
        self._transcript.accepted()

    def entered(self) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self.stage = "waiting"

    def started(self, num_cached_tokens: int, num_loaded_tokens: int, cache_miss: CacheMiss | None) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self.stage, self.has_started = "request", True
        self._transcript.started(num_cached_tokens, num_loaded_tokens, cache_miss)

    def record(self, event: Event) -> Event:
        """See :class:`enginehouse.workers.Recorder`."""
        recorded = self._transcript.record(event)
        if self._transcript.is_finished:
            self._place.answered(self)
        elif self._place.is_suspicious:
            self._place.progressed(self)
        return recorded

    def failed(self, error: EnginehouseError) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        if not isinstance(error, WorkerDied):
            self._place.answered(self)

    def thinking_stopped(self) -> None:
        """See :class:`enginehouse.workers.Recorder`."""
        self._transcript.thinking_stopped()
