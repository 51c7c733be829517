"""One accepted request on the server's side: events come in step by step and go out in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from enginehouse.errors import EnginehouseError
from enginehouse.types import Event, RequestFinished

__all__ = ["WorkerGeneration"]


class WorkerGeneration:
    """Implements :class:`enginehouse.backend.Generation`.

    Events wait here while the client is slow; the model's context bounds how many there can be.

    Args:
        loop: the event loop that everything here runs on.
        on_cancel: called once when the request is cancelled before its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], None]) -> None:
        self.num_prompt_tokens = 0
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
        if not self._accepted.done():
            self._accepted.set_result(num_prompt_tokens)

    async def wait_accepted(self) -> None:
        """Wait for the worker's verdict; raises what it was refused with."""
        self.num_prompt_tokens = await self._accepted

    def push(self, event: Event) -> None:
        """Add an event; RequestFinished is the last one."""
        self._events.append(event)
        self._is_ended = isinstance(event, RequestFinished)
        self._wake()

    def fail(self, error: EnginehouseError) -> None:
        """End with an error, after the events that are already here."""
        if self._is_ended:
            return
        self._is_ended = True
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
        self._is_ended = True
        self._events.clear()
        self._on_cancel()
        self._wake()
