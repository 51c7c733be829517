"""A request that stays while workers come and go: what the pipeline's side iterates and cancels."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from enginehouse.engine.worker import WorkerEngine, WorkerGeneration
from enginehouse.errors import EngineDead, EnginehouseError, RequestKillsWorker, WorkerDied
from enginehouse.replay.transcript import Transcript
from enginehouse.types import CacheMiss, EngineRequest, Event

__all__ = ["Home", "ReplayedGeneration"]

# Between two looks at a worker that has died and not been buried yet.
_RETRY_S = 0.05


class Home(Protocol):
    """What a request needs of the place that keeps the requests of its model together."""

    @property
    def is_suspicious(self) -> bool:
        """Whether a request of this model is on trial."""
        ...

    async def admission(self, request: ReplayedGeneration) -> WorkerEngine:
        """Wait until a request may enter the worker; returns the worker, which lives."""
        ...

    async def burial(self, engine: WorkerEngine) -> None:
        """Wait until the death of a worker is known, and what it means for its requests."""
        ...

    def progressed(self, request: ReplayedGeneration) -> None:
        """A request has come further while one is on trial."""
        ...

    def left(self, request: ReplayedGeneration) -> None:
        """A request has ended, in whatever way."""
        ...


class ReplayedGeneration:
    """Implements :class:`enginehouse.backend.Generation`, and is told what happens to the request in its worker.

    Args:
        request: what is answered.
        home: the model's requests, of which this is one.
        arrival: grows from request to request.
        timeout_s: how long it may be without a worker.

    Attributes:
        request: what is answered.
        num_suspicions: see :class:`enginehouse.replay.probation.Suspect`; so is ``num_forgiven``.
        engine: the worker that holds it; None while it is between two.
        num_replays: how often it went on in another worker.
        has_started: whether it has ever left the queue of one.
        stage: how far it has come in that worker; what is *queued* there has run no code of its own any more.
    """

    def __init__(self, request: EngineRequest, home: Home, arrival: int, timeout_s: float) -> None:
        self.num_prompt_tokens = 0
        self.arrival = arrival
        self.num_suspicions = 0
        self.num_forgiven = 0
        self.num_replays = 0
        self.has_started = False
        self.engine: WorkerEngine | None = None
        self.stage: Literal["submitted", "accepted", "queued", "running"] = "submitted"
        self.request = request
        self._home = home
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._transcript = Transcript(request, self._loop.time)
        self._stays: deque[WorkerGeneration] = deque()  # those that are still to be read
        self._last_stay: WorkerGeneration | None = None
        self._limit: asyncio.Timeout | None = None
        self._returning: asyncio.Task[None] | None = None
        self._error: EnginehouseError | None = None
        self._is_over = False

    # -- the pipeline's side -----------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Batches of events, without a gap and without repetition. Closing the iterator early cancels the request."""
        try:
            while not self._is_over:
                while self._stays:
                    try:
                        async for events in self._stays.popleft():
                            yield events
                    except WorkerDied:
                        await asyncio.sleep(0)  # the news of the death may be behind this in the loop's queue
                # While it returns, its last events may have come that nobody can read yet.
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
        """Wait until it is in a worker again, is cancelled, or cannot go on."""
        await asyncio.wait([returning])
        if self._returning is returning:
            self._returning = None
        if not returning.cancelled():
            returning.result()

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. Iteration then just ends."""
        if self._is_over:
            return
        self._is_over = True
        if self._returning is not None:
            self._returning.cancel()
        if self._last_stay is not None:
            self._last_stay.cancel()
        self._home.left(self)

    # -- into a worker, and out of it --------------------------------------------------------------

    async def enter(self, *, is_returning: bool = False) -> None:
        """Bring the request into a worker, however many die meanwhile; returns when one has accepted it.

        Args:
            is_returning: it has lost its worker, so that its time without one runs.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full.
            EngineDead: there was no worker for too long.
            RequestKillsWorker: workers die of it.
        """
        try:
            async with asyncio.timeout(self._timeout_s if is_returning else None) as self._limit:
                await self._enter()
        except TimeoutError:
            message = f"The model stopped working and was not back within {self._timeout_s:g} s; try again later."
            raise EngineDead(message) from None
        finally:
            self._limit = None

    async def _enter(self) -> None:
        while True:
            engine = await self._home.admission(self)
            self.engine, self.stage = engine, "submitted"
            try:
                stay = await engine.submit(self.request, resume=self._transcript.begin_stay(), recorder=self)
            except WorkerDied:
                await self._home.burial(engine)
            else:
                self.num_replays += self._last_stay is not None
                self._last_stay = stay
                self._stays.append(stay)
                if self.engine is engine:
                    return
                stay.detach()  # it had to step aside, or the worker died, before this was reached
            if self._error is not None:
                raise self._error

    def start_limit(self) -> None:
        """Waiting begins that somebody must end; harmless when it has begun."""
        if self._limit is not None and self._limit.when() is None:
            self._limit.reschedule(self._loop.time() + self._timeout_s)

    def lost(self) -> None:
        """The worker has died: go to the next one, unless :meth:`enter` is at it already."""
        self.engine = None
        if self._limit is not None:
            self.start_limit()
        elif self._error is None:
            self._return()

    def refuse(self, error: RequestKillsWorker) -> None:
        """Workers die of this request: end it."""
        self._error = error

    def step_aside(self) -> None:
        """Leave the worker to another request for a while."""
        self.engine = None
        if self._limit is None:
            assert self._last_stay is not None
            self._last_stay.detach()
            self._return()

    def _return(self) -> None:
        async def come_back() -> None:
            try:
                await self.enter(is_returning=True)
            except EnginehouseError as error:
                self._error = error
                self._home.left(self)

        self._returning = self._loop.create_task(come_back(), name=f"replay of {self.request.request_id}")

    # -- what happens in the worker ----------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._transcript.num_tokens

    def accepted(self, num_prompt_tokens: int) -> None:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        self.stage = "accepted"
        self.num_prompt_tokens = num_prompt_tokens
        self._transcript.accepted()

    def entered(self) -> None:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        self.stage = "queued"

    def started(self, num_cached_tokens: int, num_loaded_tokens: int, cache_miss: CacheMiss | None) -> None:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        self.stage, self.has_started = "running", True
        self._transcript.started(num_cached_tokens, num_loaded_tokens, cache_miss)

    def record(self, event: Event) -> Event:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        recorded = self._transcript.record(event)
        if self._transcript.is_finished:
            self._home.left(self)
        elif self._home.is_suspicious:
            self._home.progressed(self)
        return recorded

    def failed(self, error: EnginehouseError) -> None:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        if not isinstance(error, WorkerDied):
            self._home.left(self)

    def thinking_stopped(self) -> None:
        """See :class:`enginehouse.engine.worker.Recorder`."""
        self._transcript.thinking_stopped()
