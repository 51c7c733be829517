"""Requests that a worker has accepted, and their events on the server side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from enginehouse.contract.errors import EngineDead, EnginehouseError, WorkerDied
from enginehouse.contract.types import CacheMiss, Event, RequestFinished
from enginehouse.workers.messages import Accepted, Begun, Entered, Failure, Left, Rejected, Stage, Started, StepOutputs
from enginehouse.workers.queue_estimate import Backlog

__all__ = ["Recorder", "Requests", "WorkObserver", "WorkerGeneration"]


class WorkObserver(Protocol):
    """Receives the start and the end of a worker's work on a request or call."""

    def begun(self, stage: Stage) -> None:
        """The worker starts a stage of it."""
        ...

    def left(self) -> None:
        """A live worker no longer holds any of it."""
        ...


class Recorder(WorkObserver, Protocol):
    """Receives everything that happens to a request when it arrives from the worker, before the client reads it."""

    def accepted(self, num_prompt_tokens: int) -> None:
        """The worker has accepted the request."""
        ...

    def started(self, num_cached_tokens: int, num_loaded_tokens: int, cache_miss: CacheMiss | None) -> None:
        """The request has left the queue; the arguments say how much of its prompt was in the prefix cache."""
        ...

    def entered(self) -> None:
        """The engine holds the request and has run all plugin code for it; it may still be queued."""
        ...

    def record(self, event: Event) -> Event:
        """Record an event; returns the event to pass to the reader."""
        ...

    def failed(self, error: EnginehouseError) -> None:
        """The request ended with an error."""
        ...

    def thinking_stopped(self) -> None:
        """The end of its reasoning has been forced."""
        ...


class WorkerGeneration:
    """Implements :class:`enginehouse.contract.backend.Generation`.

    Buffers events while the client is slow; the model's context length bounds their number.

    Args:
        request_id: id of the request.
        loop: the event loop on which everything here runs.
        on_cancel: called once when the request is cancelled before its end.
        recorder: called with everything that happens.

    Attributes:
        is_accepted: True if the worker has accepted the request.
        is_begun: True if the worker has ever worked on it.
        left: done when the worker has dropped the request after its cancellation, or has died.
    """

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        on_cancel: Callable[[], None],
        recorder: Recorder | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.is_accepted = False
        self.is_begun = False
        self.recorder = recorder
        self._loop = loop
        self._on_cancel = on_cancel
        self._accepted: asyncio.Future[int] = loop.create_future()
        self._events: list[Event] = []
        self._error: EnginehouseError | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.left: asyncio.Future[None] = loop.create_future()

    # -- engine side -------------------------------------------------------------------------------

    def accept(self, num_prompt_tokens: int) -> None:
        """The worker has accepted the request."""
        self.is_accepted = True
        if self.recorder is not None:
            self.recorder.accepted(num_prompt_tokens)
        if not self._accepted.done():
            self._accepted.set_result(num_prompt_tokens)

    def begin(self, stage: Stage) -> None:
        """The worker starts a stage of it."""
        self.is_begun = True
        if self.recorder is not None:
            self.recorder.begun(stage)

    def leave(self, *, is_alive: bool = True) -> None:
        """The worker has dropped the request after its cancellation, or has died before that."""
        if is_alive and self.recorder is not None:
            self.recorder.left()
        if not self.left.done():
            self.left.set_result(None)

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet."""
        return len(self._events)

    async def wait_accepted(self) -> None:
        """Wait until the worker has accepted the request; raises the error if it was rejected."""
        self.num_prompt_tokens = await self._accepted

    def push(self, event: Event) -> None:
        """Add an event; RequestFinished is the last one."""
        self._events.append(event if self.recorder is None else self.recorder.record(event))
        if isinstance(event, RequestFinished):  # the recorder may already have ended it
            self._is_ended = True
        self._wake()

    def fail(self, error: EnginehouseError) -> None:
        """End with an error, after the buffered events."""
        if self._is_ended:
            return
        self._is_ended = True
        if self.recorder is not None:
            self.recorder.failed(error)
        if not self._accepted.done():
            self._accepted.set_exception(error)
            return
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- pipeline side -----------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over batches of events. Closing the iterator early cancels the request."""
        try:
            while True:
                if self._events:
                    events, self._events = self._events, []
                    yield events
                elif self._error is not None:
                    raise self._error
                elif self._is_ended:
                    return
                else:
                    self._waiter = self._loop.create_future()
                    await self._waiter
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. Iteration then ends without an error."""
        if self._is_ended:
            return
        self._events.clear()
        self.detach()

    def detach(self) -> None:
        """Remove the request from the worker; iteration ends after the buffered events."""
        if self._is_ended:
            return
        self._is_ended = True
        self._on_cancel()
        self._wake()


class Requests:
    """Generations by request id and by link id, the id that is used in messages.

    Args:
        backlog: told of each request that enters or leaves.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._generations: dict[str, WorkerGeneration] = {}
        self._leaving: dict[str, WorkerGeneration] = {}  # cancelled, and the worker has not sent Left yet
        self._link_ids: dict[str, str] = {}
        self._num_resumed = itertools.count(1)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._link_ids

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[WorkerGeneration]:
        return iter(self._generations.values())

    def link_id(self, request_id: str, *, is_resumed: bool) -> str:
        """Return the link id for a request that is about to be sent."""
        return f"{request_id}~{next(self._num_resumed)}" if is_resumed else request_id

    def add(self, link_id: str, generation: WorkerGeneration) -> None:
        """Add a request that was sent."""
        self._generations[link_id], self._link_ids[generation.request_id] = generation, link_id

    def find(self, request_id: str) -> tuple[str, WorkerGeneration | None]:
        """Return a request's link id, and its generation if it runs."""
        link_id = self._link_ids.get(request_id, request_id)
        return link_id, self._generations.get(link_id)

    def request_id(self, link_id: str) -> str:
        """Return the request id for a link id."""
        generation = self._generations.get(link_id)
        return generation.request_id if generation is not None else link_id

    def forget(self, link_id: str, *, is_served: bool = False) -> WorkerGeneration | None:
        """Remove a request, which was answered if ``is_served``; None if it is not present."""
        generation = self._generations.pop(link_id, None)
        if generation is not None:
            self._link_ids.pop(generation.request_id, None)
            self._backlog.leave(generation.request_id, is_served=is_served)
        return generation

    def cancel(self, link_id: str) -> bool:
        """Remove a request that the worker holds until it sends Left; False if it is not present."""
        generation = self.forget(link_id)
        if generation is not None:
            self._leaving[link_id] = generation
        return generation is not None

    @property
    def is_any_begun(self) -> bool:
        """True if the worker has worked on any of the requests that it holds."""
        return any(held.is_begun for held in (*self._generations.values(), *self._leaving.values()))

    def fail_all(self, error: EngineDead) -> None:
        """End every request with the error."""
        leaving, self._leaving = self._leaving, {}
        for generation in leaving.values():
            generation.leave(is_alive=not isinstance(error, WorkerDied))
        generations, self._generations = self._generations, {}
        self._link_ids.clear()
        for generation in generations.values():
            self._backlog.leave(generation.request_id)
            generation.fail(error)

    def handle(self, message: Accepted | Begun | Entered | Left | Rejected | Started) -> None:
        """Handle a message about one request; messages for a cancelled request are dropped, except Begun and Left."""
        if isinstance(message, Left):
            if (generation := self._leaving.pop(message.request_id, None)) is not None:
                generation.leave()
            return
        if isinstance(message, Begun):
            link_id = str(message.work)
            if (generation := self._generations.get(link_id) or self._leaving.get(link_id)) is not None:
                generation.begin(message.stage)
            return
        generation = self._generations.get(message.request_id)
        if generation is None:
            return
        if isinstance(message, Started):
            self._backlog.start(generation.request_id)
        match message:
            case Accepted():
                generation.accept(message.num_prompt_tokens)
            case Rejected():
                error = self._backlog.explain(message.failure.to_error(), generation.request_id)
                self.forget(message.request_id)
                generation.fail(error)
            case _ if generation.recorder is None:
                pass
            case Entered():
                generation.recorder.entered()
            case Started():
                generation.recorder.started(message.num_cached_tokens, message.num_loaded_tokens, message.cache_miss)

    def distribute(self, message: StepOutputs) -> None:
        """Pass the events of one step to their requests."""
        generations = self._generations
        for link_id, output in message.outputs:
            generation = generations.get(link_id)
            if generation is None:
                continue
            if isinstance(output, Failure):
                self.forget(link_id)
                generation.fail(self._backlog.explain(output.to_error(), generation.request_id))
                continue
            if isinstance(output, RequestFinished):
                self.forget(link_id, is_served=True)
            generation.push(output)
