"""Requests that a worker has accepted, and their events on the server's side."""

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
    """Is told when a worker works on a request or a question, and when it does not any more."""

    def begun(self, stage: Stage) -> None:
        """The worker begins with a part of it."""
        ...

    def left(self) -> None:
        """A worker that lives holds nothing of it any more."""
        ...


class Recorder(WorkObserver, Protocol):
    """Is told of everything that happens to a request as it comes from the worker, before it is read."""

    def accepted(self, num_prompt_tokens: int) -> None:
        """The worker has accepted the request."""
        ...

    def started(self, num_cached_tokens: int, num_loaded_tokens: int, cache_miss: CacheMiss | None) -> None:
        """The request has left the queue, with what the prefix cache had of its prompt."""
        ...

    def entered(self) -> None:
        """The engine holds it and has asked all plugins that take part; it may have to queue."""
        ...

    def record(self, event: Event) -> Event:
        """Something happened; returns what the reader is given."""
        ...

    def failed(self, error: EnginehouseError) -> None:
        """It ended with an error."""
        ...

    def thinking_stopped(self) -> None:
        """Its reasoning is closed on demand."""
        ...


class WorkerGeneration:
    """Implements :class:`enginehouse.contract.backend.Generation`.

    Events wait here while the client is slow; the model's context bounds how many there can be.

    Args:
        request_id: the request's.
        loop: the event loop that everything here runs on.
        on_cancel: called once when the request is cancelled before its end.
        recorder: told of everything that happens.

    Attributes:
        is_accepted: whether the worker has accepted the request.
        is_begun: whether the worker has ever worked on it.
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

    # -- the engine's side -------------------------------------------------------------------------

    def accept(self, num_prompt_tokens: int) -> None:
        """The worker has accepted the request."""
        self.is_accepted = True
        if self.recorder is not None:
            self.recorder.accepted(num_prompt_tokens)
        if not self._accepted.done():
            self._accepted.set_result(num_prompt_tokens)

    def begin(self, stage: Stage) -> None:
        """The worker begins with a part of it."""
        self.is_begun = True
        if self.recorder is not None:
            self.recorder.begun(stage)

    def leave(self) -> None:
        """The worker has forgotten it, as it was told to."""
        if self.recorder is not None:
            self.recorder.left()

    @property
    def num_waiting_events(self) -> int:
        """Events that have come and are not read yet."""
        return len(self._events)

    async def wait_accepted(self) -> None:
        """Wait for the worker's verdict; raises what it was refused with."""
        self.num_prompt_tokens = await self._accepted

    def push(self, event: Event) -> None:
        """Add an event; RequestFinished is the last one."""
        self._events.append(event if self.recorder is None else self.recorder.record(event))
        if isinstance(event, RequestFinished):  # the recorder may have ended it meanwhile
            self._is_ended = True
        self._wake()

    def fail(self, error: EnginehouseError) -> None:
        """End with an error, after the events that are already here."""
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

    # -- the pipeline's side -----------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Batches of events. Closing the iterator early cancels the request."""
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
        """Stop generating; idempotent, also after the end. Iteration then just ends."""
        if self._is_ended:
            return
        self._events.clear()
        self.detach()

    def detach(self) -> None:
        """Take the request out of the worker; iteration ends after the events that are already here."""
        if self._is_ended:
            return
        self._is_ended = True
        self._on_cancel()
        self._wake()


class Requests:
    """Generations by request and by their names on the link.

    Args:
        backlog: told who comes and goes.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._generations: dict[str, WorkerGeneration] = {}
        self._leaving: dict[str, WorkerGeneration] = {}  # cancelled, and the worker has not said that it is rid of it
        self._link_ids: dict[str, str] = {}
        self._num_resumed = itertools.count(1)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._link_ids

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[WorkerGeneration]:
        return iter(self._generations.values())

    def link_id(self, request_id: str, *, is_resumed: bool) -> str:
        """What a request that is about to enter is called on the link."""
        return f"{request_id}~{next(self._num_resumed)}" if is_resumed else request_id

    def add(self, link_id: str, generation: WorkerGeneration) -> None:
        """The request was sent."""
        self._generations[link_id], self._link_ids[generation.request_id] = generation, link_id

    def find(self, request_id: str) -> tuple[str, WorkerGeneration | None]:
        """A request's name on the link, and its generation if it runs."""
        link_id = self._link_ids.get(request_id, request_id)
        return link_id, self._generations.get(link_id)

    def request_id(self, link_id: str) -> str:
        """The request behind a name on the link."""
        generation = self._generations.get(link_id)
        return generation.request_id if generation is not None else link_id

    def forget(self, link_id: str, *, is_served: bool = False) -> WorkerGeneration | None:
        """Take a request out, perhaps because it was answered; None when it is not in."""
        generation = self._generations.pop(link_id, None)
        if generation is not None:
            self._link_ids.pop(generation.request_id, None)
            self._backlog.leave(generation.request_id, is_served=is_served)
        return generation

    def cancel(self, link_id: str) -> bool:
        """Take a request out that the worker still holds until it says Left; False when it is not in."""
        generation = self.forget(link_id)
        if generation is not None:
            self._leaving[link_id] = generation
        return generation is not None

    @property
    def is_any_begun(self) -> bool:
        """Whether the worker has worked on any of those that it holds."""
        return any(held.is_begun for held in (*self._generations.values(), *self._leaving.values()))

    def fail_all(self, error: EngineDead) -> None:
        """End every request."""
        leaving, self._leaving = self._leaving, {}
        if not isinstance(error, WorkerDied):
            for generation in leaving.values():
                generation.leave()
        generations, self._generations = self._generations, {}
        self._link_ids.clear()
        self._backlog.clear()
        for generation in generations.values():
            generation.fail(error)

    def handle(self, message: Accepted | Begun | Entered | Left | Rejected | Started) -> None:
        """What the worker says of one request; an answer to one that was cancelled meanwhile is dropped."""
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
        """Give each request its events of one step."""
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
