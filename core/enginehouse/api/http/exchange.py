"""HTTP requests in progress, the set of all of them, and their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from enginehouse.api.http.listeners import RequestEvents
from enginehouse.contract.errors import EnginehouseError, FirstTokenTimeout, ServerStopping, TotalTimeout
from enginehouse.recovery import Generation
from enginehouse.settings.limits import Timeouts

if TYPE_CHECKING:
    from enginehouse.api.generation.running_answers import RunningAnswer


_T = TypeVar("_T")

Receive = Callable[[], Awaitable[Any]]
"""ASGI's receive."""


class Exchange:
    """One request and its response.

    Attributes:
        disconnected: True if the client has disconnected and no longer reads the response, unless it is detached.
        error: the error with which the server ended the exchange early, or None.
        answer: the response in progress, for listing running requests; None if nothing is generated.
        on_idle: called when nothing was sent for ``ping_s`` seconds; set while a stream is open.
    """

    def __init__(self, receive: Receive, ping_s: float, events: RequestEvents | None = None) -> None:
        self._events = events
        self.disconnected = False
        self.error: EnginehouseError | None = None
        self.answer: RunningAnswer | None = None
        self.on_idle: Callable[[], Awaitable[None]] | None = None
        self._receive = receive
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._generations: list[Generation] = []
        self._is_cancelled = False
        self._is_detached = False
        self._waiting: asyncio.Task[Any] | None = None  # the one in until_ended

    @property
    def is_ended(self) -> bool:
        """True if the response is no longer wanted."""
        return self.disconnected or self.error is not None

    def begin(self, answer: RunningAnswer) -> None:
        """Record the response that is generated, and tell listeners that its request has started."""
        self.answer = answer
        if self._events is not None:
            self._events.begin(answer.record)

    def hold(self, generation: Generation) -> None:
        """Cancel ``generation`` when this exchange ends early."""
        self._generations.append(generation)
        if self._is_cancelled:
            generation.cancel()

    def cancel(self) -> None:
        """Cancel all held generations, and those held later; no effect on finished ones."""
        self._is_cancelled = True
        for generation in self._generations:
            generation.cancel()

    def end(self, error: EnginehouseError) -> None:
        """End early; the client receives ``error``."""
        if not self.is_ended:
            self.error = error
            self._stop_work()

    def detach(self) -> None:
        """Let the response go on when its client disconnects from now on; its output is then discarded."""
        self._is_detached = True

    def sent(self) -> None:
        """Record that something was sent now."""
        self._last_sent = self._loop.time()

    async def until_ended(self, work: Awaitable[Any]) -> Any:
        """Await ``work``, cancelling it and returning None as soon as the exchange ends."""
        if self.is_ended:
            asyncio.ensure_future(work).cancel()
            return None
        task = self._waiting = asyncio.current_task()  # the work gets no task of its own, whose start would cost more
        assert task is not None
        try:
            return await work
        except asyncio.CancelledError:
            if self._waiting is not None or task.uncancel():
                raise  # cancelled from elsewhere
            return None
        finally:
            self._waiting = None

    async def watch(self) -> None:
        """Wait for the client to disconnect, keeping an idle stream open. Runs concurrently with the response."""
        while True:
            try:
                async with asyncio.timeout(max(0.01, self._last_sent + self._ping_s - self._loop.time())):
                    message = await self._receive()
            except TimeoutError:
                if self._loop.time() - self._last_sent >= self._ping_s:
                    self.sent()
                    if self.on_idle is not None:
                        await self.on_idle()
                continue
            if message["type"] == "http.disconnect":
                if not self._is_detached:
                    self.disconnected = True
                    self._stop_work()
                return

    def _stop_work(self) -> None:
        self.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class OpenExchanges:
    """All running exchanges and admin operations. ``stopping`` refuses new ones.

    Attributes:
        events: events of requests.
    """

    def __init__(self) -> None:
        self.events = RequestEvents()
        self.stopping = False
        self._open: set[Exchange] = set()
        self._commands: set[asyncio.Task[Any]] = set()
        self._end: EnginehouseError | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(tuple(self._open))

    @contextlib.asynccontextmanager
    async def open(self, receive: Receive, ping_s: float) -> Any:
        """Open an exchange that is watched until the block ends."""
        self._check_running()
        exchange = Exchange(receive, ping_s, self.events)
        self._open.add(exchange)
        watcher = asyncio.create_task(exchange.watch())
        try:
            yield exchange
        finally:
            self._open.discard(exchange)
            watcher.cancel()
            exchange.cancel()

    async def follow(self, command: Coroutine[Any, Any, _T]) -> _T:
        """Return an admin operation's result, even if its client disconnects. Raises the error of :meth:`end_all`."""
        task = asyncio.ensure_future(command)
        try:
            self._check_running()
            self._commands.add(task)
            return await task
        except asyncio.CancelledError:
            if self._end is None:
                raise
            raise self._end from None
        finally:
            self._commands.discard(task)
            task.cancel()

    def end_all(self, error: EnginehouseError) -> None:
        """End every exchange and admin operation early."""
        self._end = error
        for exchange in self:
            exchange.end(error)
        for command in self._commands:
            command.cancel()

    def _check_running(self) -> None:
        if self.stopping:
            raise ServerStopping("The server is shutting down.")


@contextlib.contextmanager
def deadlines(exchange: Exchange, timeouts: Timeouts, began: float, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Enforce timeouts while the block runs.

    Args:
        exchange: ended on timeout, which frees the slots of its requests.
        timeouts: the limits.
        began: ``time.perf_counter`` at the request's arrival.
        has_begun: returns True if the response has started; called when the first-token timeout expires.
    """
    loop = asyncio.get_running_loop()
    passed_s = time.perf_counter() - began

    def end(error: EnginehouseError, unless: Callable[[], bool]) -> None:
        if not unless():
            exchange.end(error)

    timers = [
        loop.call_later(max(0.0, seconds - passed_s), end, error(seconds), unless)
        for seconds, error, unless in (
            (timeouts.first_token_s, _first_token, has_begun),
            (timeouts.total_s, _total, lambda: False),
        )
        if seconds is not None
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _first_token(seconds: float) -> EnginehouseError:
    return FirstTokenTimeout(f"The answer did not begin within {seconds:g} s (first_token_timeout_s).")


def _total(seconds: float) -> EnginehouseError:
    return TotalTimeout(f"The answer took longer than {seconds:g} s (total_timeout_s).")
