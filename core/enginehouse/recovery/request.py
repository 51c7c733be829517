"""A request that enters the next worker when its worker dies, and continues there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import CacheMiss, EngineRequest, Event
from enginehouse.contract.usage import Usage
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.transcript import Transcript
from enginehouse.recovery.work import Work
from enginehouse.workers.requests import WorkerStream

__all__ = ["RecoverableRequest"]

# Seconds between checks of a worker that has died and whose death is not reported yet.
_RETRY_S = 0.05


class RecoverableRequest(Work):
    """The attempts of workers at one request.

    Args:
        request: the request to answer.
        model_work: the work of the model, to which this belongs.
        timeout_s: maximum time without a worker.
        written: see :class:`Work`.

    Attributes:
        num_replays: number of times that it continued in another worker.
        has_started: True if it has ever left the queue of a worker.
    """

    def __init__(self, request: EngineRequest, model_work: ModelWork, timeout_s: float, written: Sequence[str]) -> None:
        super().__init__(request.caller, model_work.next_arrival(), request, timeout_s, written)
        self.num_replays = 0
        self.has_started = False
        self._model_work = model_work
        self._loop = asyncio.get_running_loop()
        self._transcript = Transcript(request, self._loop.time)
        self._unread: deque[WorkerStream] = deque()  # attempts that are still to be read
        self._last_attempt: WorkerStream | None = None
        self._returning: asyncio.Task[None] | None = None
        self._error: EnginehouseError | None = None
        self._must_step_aside = False  # as soon as it is known to be in the worker

    # -- reader's side -----------------------------------------------------------------------------

    async def begin(self) -> WorkerStream:
        """Submit the request for the first time; return the first attempt when a worker has accepted it.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full.
            EngineDead: there was no worker for too long.
            RequestKillsWorker: workers die of it.
        """
        try:
            await self._enter(is_returning=False)
        except BaseException:
            self.cancel()
            raise
        return self._unread.popleft()

    async def next_attempt(self) -> WorkerStream | None:
        """Wait for the next attempt, after the last one has ended; None if the request has ended.

        Raises:
            EnginehouseError: as :meth:`begin`, if it cannot continue.
        """
        while not self._unread:
            # While the request returns, last events may have arrived that cannot be read yet.
            if self._returning is not None:
                await self._return_of_request(self._returning)
            elif self._error is not None:
                raise self._error
            elif self.is_over:
                return None
            else:
                await asyncio.sleep(_RETRY_S)
        return self._unread.popleft()

    async def _return_of_request(self, returning: asyncio.Task[None]) -> None:
        """Wait until the request is in a worker again, is cancelled, or cannot continue."""
        await asyncio.wait([returning])
        if self._returning is returning:
            self._returning = None
        if not returning.cancelled():
            returning.result()

    @property
    def num_waiting_events(self) -> int:
        """Number of events of attempts that nothing reads yet."""
        return sum(attempt.num_waiting_events for attempt in self._unread)

    def cancel(self) -> None:
        """Stop all attempts; idempotent, also after the end."""
        if self.is_over:
            return
        if self._returning is not None:
            self._returning.cancel()
        if self._last_attempt is not None:
            self._last_attempt.cancel()
        self._model_work.over(self)

    # -- entering and leaving a worker -------------------------------------------------------------

    async def _enter(self, *, is_returning: bool) -> None:
        """Submit the request to a worker, again if that dies, until one has accepted it.

        Args:
            is_returning: True if it has lost its worker, so that its time limit without a worker starts now.
        """
        async with self.bounded(from_now=is_returning):
            while True:
                engine = await self._model_work.admission(self)
                try:
                    attempt = await engine.submit(self.request, resume=self._transcript.begin_stay(), observer=self)
                except WorkerDied:
                    await self._model_work.death(engine)
                    continue
                except EnginehouseError:
                    self._model_work.answered(self)
                    raise
                self.num_replays += self._last_attempt is not None
                self._last_attempt = attempt
                self._unread.append(attempt)
                if self.is_over or (self.engine is engine and not self._must_step_aside):
                    return
                self._must_step_aside = False
                attempt.detach()  # the request had to step aside, or the worker died, before this point

    def lost(self) -> None:
        """The worker has died: return to the next one, unless the request is entering one already."""
        if self.is_bounded:
            self.start_limit()
        else:
            self._return()

    def step_aside(self) -> None:
        """Leave the worker to other work for a while."""
        if self.is_bounded:
            self._must_step_aside = True
        else:
            assert self._last_attempt is not None
            self._last_attempt.detach()
            self._return()

    def _return(self) -> None:
        self._returning = self._loop.create_task(self._come_back(), name=f"replay of {self.request.request_id}")

    async def _come_back(self) -> None:
        try:
            await self._enter(is_returning=True)
        except EnginehouseError as error:
            self._error = error
            self._model_work.over(self)

    # -- events of the worker ----------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        return self._transcript.num_tokens

    def left(self) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        self._model_work.left(self)

    def accepted(self) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        self.stage = "waiting"
        self._transcript.accepted()

    def entered(self) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        self.stage = "waiting"

    def started(self, usage: Usage, cache_miss: CacheMiss | None) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        self.stage, self.has_started = "request", True
        self._transcript.started(usage, cache_miss)

    def record(self, event: Event) -> Event:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        recorded = self._transcript.record(event)
        if self._transcript.is_finished:
            self._model_work.answered(self)
        elif self._model_work.is_suspicious:
            self._model_work.progressed(self)
        return recorded

    def failed(self, error: EnginehouseError) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        if not isinstance(error, WorkerDied):
            self._model_work.answered(self)

    def thinking_stopped(self) -> None:
        """See :class:`enginehouse.workers.requests.WorkObserver`."""
        self._transcript.thinking_stopped()
