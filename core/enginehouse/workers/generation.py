"""One accepted request on the server's side: events come in step by step and go out in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import CacheMiss, Event, RequestFinished
from enginehouse.workers.messages import Stage

__all__ = ["Recorder", "WorkObserver", "WorkerGeneration"]


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
