"""Requests that a worker has accepted and calls that it has not answered, on the server side.

Events are distributed to their requests; a call has one answer, matched by its number.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from enginehouse.contract.errors import EngineDead, EnginehouseError, WorkerDied
from enginehouse.contract.types import CacheMiss, Event, RequestFinished
from enginehouse.contract.usage import Usage
from enginehouse.workers.messages import (
    Accepted,
    Cached,
    CallFailed,
    Detokenized,
    Entered,
    Failure,
    Left,
    Pooled,
    Rejected,
    Stage,
    StageBegan,
    Started,
    Stats,
    StepOutputs,
    ThinkingStopped,
    Tokenized,
    View,
)
from enginehouse.workers.request_queue import RequestQueue

CallMessage = StageBegan | Cached | CallFailed | Detokenized | Pooled | Stats | ThinkingStopped | Tokenized | View

NO_CALL = -1
"""Call number of pings, whose answer is not delivered; its arrival is enough."""


class Calls:
    """Calls that the worker has not answered, including those whose caller has gone. Used on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[asyncio.Future[Any], WorkObserver | None]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def next_number(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    async def answer_to(self, number: int, observer: WorkObserver | None) -> Any:
        """Wait for the answer; raises the error with which the call was refused."""
        answer = self._loop.create_future()
        self._open[number] = answer, observer
        return await answer

    def handle(self, message: CallMessage) -> None:
        """Handle the start or the answer of a call; an answer that is no longer awaited is dropped."""
        if isinstance(message, StageBegan):
            self._note_stage(message)
            return
        future, observer = self._open.pop(message.call, (None, None))
        if future is None:
            return
        if observer is not None:
            observer.left()
        match message:
            case Tokenized():
                settle(future, message.token_ids)
            case Detokenized():
                settle(future, message.pieces)
            case Pooled():
                settle(future, message.result)
            case Stats():
                settle(future, message.stats)
            case Cached():
                settle(future, message.num_tokens)
            case View():
                settle(future, message.view)
            case ThinkingStopped():
                settle(future, message.num_choices)
            case CallFailed():
                settle(future, message.failure.to_error())

    def _note_stage(self, message: StageBegan) -> None:
        _, observer = self._open.get(int(message.work), (None, None))
        if observer is not None:
            observer.stage_began(message.stage)

    def refuse(self, number: int, error: EnginehouseError) -> None:
        """End the wait for an answer with an error; the answer is still expected from the worker."""
        if (waiting := self._open.get(number)) is not None:
            settle(waiting[0], error)

    def fail_all(self, error: EnginehouseError) -> None:
        """Fail all open calls; no more answers will come."""
        still_open, self._open = self._open, {}
        for future, observer in still_open.values():
            if observer is not None and not isinstance(error, WorkerDied):
                observer.left()
            settle(future, error)


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future its result or error, unless it has one or its waiter was cancelled."""
    if future.done():
        return
    if isinstance(outcome, EnginehouseError):
        future.set_exception(outcome)
        future.exception()  # marks it as retrieved, in case it is never awaited
    else:
        future.set_result(outcome)


class WorkObserver:
    """Receives what happens to a request or call when it arrives from the worker, before a client reads it.

    Does nothing by itself. Calls have a beginning and an end only.
    """

    def accepted(self) -> None:
        """The worker has accepted the request."""

    def stage_began(self, stage: Stage) -> None:
        """The worker starts a stage of it."""

    def entered(self) -> None:
        """The engine holds the request and has run all plugin code for it; it may still be queued."""

    def started(self, usage: Usage, cache_miss: CacheMiss | None) -> None:
        """The request has left the queue; the arguments say how much of its prompt was in the prefix cache."""

    def record(self, event: Event) -> Event:
        """Record an event; returns the event to pass to the reader."""
        return event

    def thinking_stopped(self) -> None:
        """The end of its reasoning has been forced."""

    def failed(self, error: EnginehouseError) -> None:
        """The request ended with an error."""

    def left(self) -> None:
        """A live worker no longer holds any of it."""


class WorkerStream:
    """Implements :class:`enginehouse.contract.engine.EngineStream` for a request that was sent to a worker.

    Buffers events while the client is slow; the model's context length bounds their number.

    Args:
        request_id: id of the request.
        loop: the event loop on which everything here runs.
        on_cancel: called once when the request is cancelled before its end.
        observer: called with everything that happens.

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
        observer: WorkObserver | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.prompt_token_ids: Sequence[int] | None = None
        self.is_accepted = False
        self.is_begun = False
        self.observer = observer or WorkObserver()
        self._loop = loop
        self._on_cancel = on_cancel
        self._accepted: asyncio.Future[None] = loop.create_future()
        self._events: list[Event] = []
        self._error: EnginehouseError | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.left: asyncio.Future[None] = loop.create_future()

    # -- engine side -------------------------------------------------------------------------------

    def accept(self, num_prompt_tokens: int, prompt_token_ids: Sequence[int] | None = None) -> None:
        """The worker has accepted the request."""
        self.is_accepted = True
        self.num_prompt_tokens, self.prompt_token_ids = num_prompt_tokens, prompt_token_ids
        self.observer.accepted()
        if not self._accepted.done():
            self._accepted.set_result(None)

    def begin(self, stage: Stage) -> None:
        """The worker starts a stage of it."""
        self.is_begun = True
        self.observer.stage_began(stage)

    def leave(self, *, is_alive: bool = True) -> None:
        """The worker has dropped the request after its cancellation, or has died before that."""
        if is_alive:
            self.observer.left()
        if not self.left.done():
            self.left.set_result(None)

    async def wait_accepted(self) -> None:
        """Wait until the worker has accepted the request; raises the error if it was rejected."""
        await self._accepted

    def push(self, event: Event) -> None:
        """Add an event; RequestFinished is the last one."""
        self._events.append(self.observer.record(event))
        if isinstance(event, RequestFinished):  # the observer may already have ended it
            self._is_ended = True
        self._wake()

    def fail(self, error: EnginehouseError) -> None:
        """End with an error, after the buffered events."""
        if self._is_ended:
            return
        self._is_ended = True
        self.observer.failed(error)
        if not self._accepted.done():
            self._accepted.set_exception(error)
            return
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- reader's side -----------------------------------------------------------------------------

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet."""
        return len(self._events)

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


class RequestTable:
    """Streams of the requests that a worker holds, by request id and by link id, the id that is used in messages.

    Args:
        request_queue: records each request that enters or leaves.
    """

    def __init__(self, request_queue: RequestQueue) -> None:
        self._request_queue = request_queue
        self._streams: dict[str, WorkerStream] = {}
        self._leaving: dict[str, WorkerStream] = {}  # cancelled, and the worker has not sent Left yet
        self._link_ids: dict[str, str] = {}
        self._num_resumed = itertools.count(1)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._link_ids

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[WorkerStream]:
        return iter(self._streams.values())

    def link_id(self, request_id: str, *, is_resumed: bool) -> str:
        """Return the link id for a request that is about to be sent."""
        return f"{request_id}~{next(self._num_resumed)}" if is_resumed else request_id

    def add(self, link_id: str, stream: WorkerStream) -> None:
        """Add a request that was sent."""
        self._streams[link_id], self._link_ids[stream.request_id] = stream, link_id

    def find(self, request_id: str) -> tuple[str, WorkerStream | None]:
        """Return a request's link id, and its stream if it runs."""
        link_id = self._link_ids.get(request_id, request_id)
        return link_id, self._streams.get(link_id)

    def request_id(self, link_id: str) -> str:
        """Return the request id for a link id."""
        stream = self._streams.get(link_id)
        return stream.request_id if stream is not None else link_id

    def forget(self, link_id: str, *, is_served: bool = False) -> WorkerStream | None:
        """Remove a request, which was answered if ``is_served``; None if it is not present."""
        stream = self._streams.pop(link_id, None)
        if stream is not None:
            self._link_ids.pop(stream.request_id, None)
            self._request_queue.leave(stream.request_id, is_served=is_served)
        return stream

    def cancel(self, link_id: str) -> bool:
        """Remove a request that the worker holds until it sends Left; False if it is not present."""
        stream = self.forget(link_id)
        if stream is not None:
            self._leaving[link_id] = stream
        return stream is not None

    @property
    def is_any_begun(self) -> bool:
        """True if the worker has worked on any of the requests that it holds."""
        return any(held.is_begun for held in (*self._streams.values(), *self._leaving.values()))

    def fail_all(self, error: EngineDead) -> None:
        """End every request with the error."""
        leaving, self._leaving = self._leaving, {}
        for stream in leaving.values():
            stream.leave(is_alive=not isinstance(error, WorkerDied))
        streams, self._streams = self._streams, {}
        self._link_ids.clear()
        for stream in streams.values():
            self._request_queue.leave(stream.request_id)
            stream.fail(error)

    def handle(self, message: Accepted | StageBegan | Entered | Left | Rejected | Started) -> None:
        """Handle a message about one request; for a cancelled request, only StageBegan and Left."""
        if isinstance(message, Left):
            if (stream := self._leaving.pop(message.request_id, None)) is not None:
                stream.leave()
            return
        if isinstance(message, StageBegan):
            link_id = str(message.work)
            if (stream := self._streams.get(link_id) or self._leaving.get(link_id)) is not None:
                stream.begin(message.stage)
            return
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if isinstance(message, Started):
            self._request_queue.start(stream.request_id)
        match message:
            case Accepted():
                stream.accept(message.num_prompt_tokens, message.prompt_token_ids)
            case Rejected():
                error = self._request_queue.explain(message.failure.to_error(), stream.request_id)
                self.forget(message.request_id)
                stream.fail(error)
            case Entered():
                stream.observer.entered()
            case Started():
                stream.observer.started(message.usage, message.cache_miss)

    def distribute(self, message: StepOutputs) -> None:
        """Pass the events of one step to their requests."""
        streams = self._streams
        for link_id, output in message.outputs:
            stream = streams.get(link_id)
            if stream is None:
                continue
            if isinstance(output, Failure):
                self.forget(link_id)
                stream.fail(self._request_queue.explain(output.to_error(), stream.request_id))
                continue
            if isinstance(output, RequestFinished):
                self.forget(link_id, is_served=True)
            stream.push(output)
