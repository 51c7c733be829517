"""The generation that pipeline and API hold: the answer to one request, from its acceptance to its end.

Its request enters the next worker when its worker dies, and continues there from its transcript. Events are recorded
when they arrive, before they are read, so that a slow client neither loses nor repeats any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from attrs import define, field
from msgspec.structs import replace

from enginehouse.contract.engine import EngineStream, Placement, placement_of
from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import (
    CacheMiss,
    ChoiceFinished,
    EngineRequest,
    Event,
    HeldTokens,
    PromptLogprobs,
    RequestFinished,
    Resume,
    ResumedChoice,
    TextDelta,
)
from enginehouse.contract.usage import Usage
from enginehouse.plugins import Guard
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.work import Work
from enginehouse.serving import LoadedModel
from enginehouse.serving.leases import Lease
from enginehouse.workers.request_table import WorkerStream


@define(eq=False)
class _Choice:
    """The reported part of one choice; see :class:`ResumedChoice`."""

    token_ids: list[int] = field(factory=list)
    held: HeldTokens | None = None
    probabilities: list[float | None] = field(factory=list)
    finished: ChoiceFinished | None = None

    def resumed(self, index: int) -> ResumedChoice:
        held = self.held or HeldTokens(())
        token_ids = (*self.token_ids, *held.token_ids)
        return ResumedChoice(index, token_ids, held.logprobs, tuple(self.probabilities))


class Transcript:
    """Transcript of one request.

    Args:
        request: the request that is answered.
        clock: seconds, monotonic.

    Attributes:
        num_tokens: number of visible tokens of the answer so far, over all choices.
        is_finished: True if the last event has arrived.
    """

    def __init__(self, request: EngineRequest, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices = [_Choice() for _ in range(request.num_choices)]
        self._num_stays = 0
        self._num_scored = 0
        self._at_start = Usage()
        self._cache_miss: CacheMiss | None = None
        self._work_before = Usage()  # in all previous attempts
        self._work = Usage()  # in the current attempt
        self._is_thinking_stopped = False
        self._accepted_s: float | None = None
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self.num_tokens = 0
        self.is_finished = False

    def begin_stay(self) -> Resume | None:
        """Begin an attempt in a worker; returns the progress of the previous ones, or None for the first."""
        self._num_stays += 1
        self._work_before, self._work = self._work_before + self._work, Usage()
        if self._num_stays == 1:
            return None
        choices = tuple(choice.resumed(i) for i, choice in enumerate(self._choices) if choice.finished is None)
        return Resume(choices, self._num_scored, self._is_thinking_stopped)

    def accepted(self) -> None:
        """A worker has accepted the request."""
        if self._accepted_s is None:
            self._accepted_s = self._clock()

    def started(self, usage: Usage, cache_miss: CacheMiss | None = None) -> None:
        """The request has left the queue. Only the first prefix cache hit counts: later ones find its own tokens."""
        if self._started_s is None:
            self._started_s = self._clock()
            self._at_start, self._cache_miss = usage, cache_miss

    def thinking_stopped(self) -> None:
        """The end of its reasoning has been forced."""
        self._is_thinking_stopped = True

    def record(self, event: Event) -> Event:
        """Record an event; returns the event to pass to the reader."""
        if isinstance(event, TextDelta):
            choice = self._choices[event.choice]
            choice.token_ids += event.token_ids
            choice.held = event.held
            if event.probabilities:
                choice.probabilities += event.probabilities
            self.num_tokens += len(event.token_ids)
            if event.work is not None:
                self._work = event.work
            if self._first_token_s is None and self._started_s is not None:  # tokens may be forced before the start
                self._first_token_s = self._clock()
        elif isinstance(event, ChoiceFinished):
            self._choices[event.choice].finished = event
        elif isinstance(event, PromptLogprobs):
            self._num_scored += len(event.entries)
        elif isinstance(event, RequestFinished):
            self.is_finished = True
            return event if self._num_stays == 1 else self._summary(event)
        return event

    def _summary(self, event: RequestFinished) -> RequestFinished:
        """Combine the statistics of all attempts; a pause counts towards the phase in which it occurred."""
        now_s = self._clock()
        accepted_s = self._accepted_s if self._accepted_s is not None else now_s
        started_s = self._started_s if self._started_s is not None else now_s
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        answer = sum((choice.finished.usage for choice in self._choices if choice.finished is not None), Usage())
        usage = replace(
            self._work_before + event.usage,
            cached_tokens=self._at_start.cached_tokens,
            loaded_prompt_tokens=self._at_start.loaded_prompt_tokens,
            completion_tokens=answer.completion_tokens,
            reasoning_tokens=answer.reasoning_tokens,
            forced_tokens=answer.forced_tokens,
            queue_s=started_s - accepted_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
        )
        return RequestFinished(usage, self._cache_miss)


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
        self._must_leave = False  # as soon as it is known to be in the worker

    # -- reader's side -----------------------------------------------------------------------------

    async def submit(self) -> WorkerStream:
        """Submit the request for the first time; return the first attempt when a worker has accepted it.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full.
            EngineDead: there was no worker for too long.
            RequestKillsWorker: workers die of it.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel)
            await self._submit_to_worker(is_returning=False)
            undo.pop_all()
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

    async def _submit_to_worker(self, *, is_returning: bool) -> None:
        """Submit the request to a worker, again if that dies, until one has accepted it.

        Args:
            is_returning: True if it has lost its worker, so that its time limit without a worker starts now.
        """
        async with self.bounded(from_now=is_returning):
            while True:
                engine = await self._model_work.worker_for(self)
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
                if self.is_over or (self.engine is engine and not self._must_leave):
                    return
                self._must_leave = False
                attempt.detach()  # the request had to leave, or the worker died, before this point

    def lost(self) -> None:
        """The worker has died: return to the next one, unless the request is entering one already."""
        if self.is_bounded:
            self.start_limit()
        else:
            self._return()

    def leave_worker(self) -> None:
        """Leave the worker to other work for a while."""
        if self.is_bounded:
            self._must_leave = True
        else:
            assert self._last_attempt is not None
            self._last_attempt.detach()
            self._return()

    def _return(self) -> None:
        self._returning = self._loop.create_task(self._come_back(), name=f"replay of {self.request.request_id}")

    async def _come_back(self) -> None:
        try:
            await self._submit_to_worker(is_returning=True)
        except EnginehouseError as error:
            self._error = error
            self._model_work.over(self)

    # -- events of the worker ----------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        return self._transcript.num_tokens

    def left(self) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        self._model_work.left(self)

    def accepted(self) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        self.stage = "waiting"
        self._transcript.accepted()

    def entered(self) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        self.stage = "waiting"

    def started(self, usage: Usage, cache_miss: CacheMiss | None) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        self.stage, self.has_started = "request", True
        self._transcript.started(usage, cache_miss)

    def record(self, event: Event) -> Event:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        recorded = self._transcript.record(event)
        if self._transcript.is_finished:
            self._model_work.answered(self)
        elif self._model_work.has_quarantined:
            self._model_work.progressed(self)
        return recorded

    def failed(self, error: EnginehouseError) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        if not isinstance(error, WorkerDied):
            self._model_work.answered(self)

    def thinking_stopped(self) -> None:
        """See :class:`enginehouse.workers.request_table.WorkObserver`."""
        self._transcript.thinking_stopped()


class OutcomeObserver(Protocol):
    """Receives the outcome of a generation."""

    def answered(self) -> None:
        """The first batch has arrived."""

    def raised(self, error: EnginehouseError) -> None:
        """An error occurred before the first batch."""

    def ended(self) -> None:
        """The generation has ended. Called last, after any other outcome."""


class Generation:
    """The answer to one request that was accepted. It may be iterated once, or cancelled.

    Args:
        attempt: the events of the engine that has accepted the request.
        request: continues the request in the next worker; None if the answer ends with the engine.
        guard: the guard of an engine that a plugin has opened; None for those in workers.

    Attributes:
        ahead: batches that were read ahead of the reader.
        hides_logprobs: True if log-probabilities are removed from the batches that the reader gets.
        outcome_observer: receives the outcome.
    """

    def __init__(
        self, attempt: EngineStream, request: RecoverableRequest | None = None, guard: Guard | None = None
    ) -> None:
        self._guard = guard
        self.ahead: deque[Sequence[Event]] = deque()
        self.hides_logprobs = False
        self.outcome_observer: OutcomeObserver | None = None
        self._attempt = attempt
        self._request = request
        self._reading: AsyncIterator[Sequence[Event]] | None = None  # once something is read ahead
        self._has_begun = False
        self._is_cancelled = False
        self._error: EnginehouseError | None = None
        self._lease: Lease[LoadedModel] | None = None

    # -- status ------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; some engines learn it only at the end."""
        return self._attempt.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt of a request with ``return_token_ids``; None for others, and if the engine does not know it."""
        return self._attempt.prompt_token_ids

    @property
    def placement(self) -> Placement | None:
        """The replica of its engine that answers; None for engines without several."""
        placed = self._request.placement if self._request is not None else None
        return placed or placement_of(self._attempt)

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet."""
        num_unread = self._request.num_waiting_events if self._request is not None else 0
        return self._attempt.num_waiting_events + num_unread

    @property
    def has_started(self) -> bool:
        """True if it has left the queue of its engine; always true without recovery."""
        return self._request is None or self._request.has_started

    @property
    def num_replays(self) -> int:
        """Number of times that it continued in another worker."""
        return self._request.num_replays if self._request is not None else 0

    # -- reading -----------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over batches of events, without gaps or repetition. Closing the iterator early cancels the request.

        Raises:
            EnginehouseError: the request has failed, or :meth:`fail` was called.
        """
        if self.ahead or self._reading is not None or self.hides_logprobs:
            return self._after_reading_ahead()
        return self._read()

    async def read_ahead(self) -> Sequence[Event] | None:
        """Read one more batch, which stays available to the reader; None at the end. Raises like iteration."""
        if self._reading is None:
            self._reading = self._read()
        batch = await anext(self._reading, None)
        if batch is not None:
            self.ahead.append(batch)
        return batch

    async def _after_reading_ahead(self) -> AsyncIterator[Sequence[Event]]:
        try:
            while self.ahead or await self.read_ahead():
                batch = self.ahead.popleft()
                yield _without_logprobs(batch) if self.hides_logprobs else batch
        finally:
            self.cancel()

    async def _read(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the batches of all attempts."""
        try:
            attempt: EngineStream | None = self._attempt
            while attempt is not None and not self._is_cancelled:
                self._attempt = attempt
                try:
                    with self._guard.calling("its stream") if self._guard is not None else contextlib.nullcontext():
                        async for batch in attempt:
                            if not self._has_begun:
                                self._begin()
                            yield batch
                except WorkerDied:
                    if self._request is None:
                        raise
                    await asyncio.sleep(0)  # the event loop may still have to deliver the news of the death
                attempt = await self._request.next_attempt() if self._request is not None else None
            if self._error is not None:
                raise self._error
        except EnginehouseError as error:
            if self.outcome_observer is not None and not self._has_begun:
                self.outcome_observer.raised(error)
            raise
        finally:
            self.cancel()

    def _begin(self) -> None:
        self._has_begun = True
        if self.outcome_observer is not None:
            self.outcome_observer.answered()

    # -- ending ------------------------------------------------------------------------------------

    def keep(self, lease: Lease[LoadedModel]) -> None:
        """Release the lease at the end; if the lease ends first, fail with its reason."""
        self._lease = lease
        lease.tie(self)

    def fail(self, error: EnginehouseError) -> None:
        """Stop generating; iteration raises ``error``."""
        self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. Iteration then ends without an error."""
        self._is_cancelled = True
        self._reading = None  # it refers to this generation; break the cycle without the garbage collector
        if self._request is not None:
            self._request.cancel()
        else:
            self._attempt.cancel()
        if self._lease is not None:
            self._lease.release()
        if self.outcome_observer is not None:
            self.outcome_observer.ended()


def _without_logprobs(batch: Sequence[Event]) -> Sequence[Event]:
    return [replace(event, logprobs=None) if isinstance(event, TextDelta) else event for event in batch]
