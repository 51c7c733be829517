"""Lifecycle of one model's worker: its states, the table of transitions, its status and events, and the drain.

``TRANSITIONS`` is the table of docs/recovery.md ("States of a model"). ``served`` and ``restarts`` send the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

from attrs import define, field, frozen

from enginehouse.contract.calls import ModelState
from enginehouse.contract.errors import ModelUnloaded
from enginehouse.contract.types import ModelInfo
from enginehouse.serving.leases import Uses, Waiters

EventKind = Literal[
    "downloading",
    "loading",
    "ready",
    "draining",
    "unloaded",
    "failed",
    "restarting",
    "restarted",
    "replaced",
    "removed",
    "added",
]

_MAX_WAITING = 1000


@frozen(kw_only=True)
class ModelEvent:
    """An event of a model.

    Attributes:
        kind: ``downloading`` and ``loading`` occur several times, ``restarted`` replaces ``ready`` after a worker's
            death; ``added``, ``replaced`` and ``removed`` result from a configuration change.
        instance: number that distinguishes models with the same name, see ``ModelStatus``; for ``replaced`` that of the
            new one, which may have loaded before.
        progress: share of a load or download, 0 to 1.
        text: current activity of a load or download, or the reason for the event.
        at: Unix time in seconds.
    """

    kind: EventKind
    model: str
    instance: int = 1
    progress: float = 0.0
    text: str = ""
    at: float = field(factory=time.time)


Publish = Callable[[ModelEvent], None]
"""Accepts an event; called on the event loop, does not block."""


_E = TypeVar("_E")


@define(eq=False)
class Subscription(Generic[_E]):
    """Events for one listener. ``num_lost`` counts events that were dropped because it was too slow."""

    num_lost: int = 0
    _waiting: asyncio.Queue[_E] = field(factory=lambda: asyncio.Queue(_MAX_WAITING))

    def push(self, event: _E) -> None:
        """Add an event; if the queue is full, the oldest one is dropped."""
        if self._waiting.full():
            self._waiting.get_nowait()
            self.num_lost += 1
        self._waiting.put_nowait(event)

    async def next(self) -> _E:
        """Wait for the next event."""
        return await self._waiting.get()

    async def __aiter__(self) -> AsyncIterator[_E]:
        """Iterate over events as they arrive; never ends by itself."""
        while True:
            yield await self.next()


class Events(Generic[_E]):
    """Passes every event to every listener."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription[Any]] = set()

    def __bool__(self) -> bool:
        """True if there is a listener."""
        return bool(self._subscriptions)

    def publish(self, event: _E) -> None:
        """Pass an event to all listeners."""
        for subscription in self._subscriptions:
            subscription.push(event)

    @contextmanager
    def subscribe(self, subscription: Subscription[Any] | None = None) -> Iterator[Subscription[_E]]:
        """Receive events within the block; with ``subscription``, in its queue, among the events that it has."""
        subscription = Subscription() if subscription is None else subscription
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)


@frozen(kw_only=True)
class ModelStatus:
    """Status of one model at one time.

    Attributes:
        instance: number of the model among all that this server has had; a new configuration may replace it by another
            one with the same name.
        created: Unix time in seconds when this server began to serve the model.
        adapters: names of its adapters.
        info: information from the last successful load; None before it.
        error: reason why the model failed, could not be loaded, or is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: current activity of the load.
        backend: name of the chosen backend; None before the choice.
        reason: reason for the choice of this backend.
        num_restarts: number of times that its worker died and was restarted.
        on_demand: True if its load was started for a request, so that requests wait for it.
        num_running: number of requests that use it.
        num_waiting: number of requests that wait for it to be loaded.
        idle_s: seconds since its last use; None while it is used or not loaded.
        memory_bytes: memory that it holds by its backend's estimate, on ``device``; None if it holds none.
        replicas: number of requests in each of its workers on other machines, by place; None if it has none of these.
    """

    name: str
    instance: int
    state: ModelState
    aliases: tuple[str, ...]
    created: int
    adapters: tuple[str, ...] = ()
    info: ModelInfo | None = None
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    backend: str | None = None
    reason: str = ""
    num_restarts: int = 0
    on_demand: bool = False
    num_running: int = 0
    num_waiting: int = 0
    idle_s: float | None = None
    memory_bytes: int | None = None
    device: str | None = None
    replicas: Mapping[str, int] | None = None


_M = TypeVar("_M")

Event = Literal["load", "postponed", "opened", "died", "drain", "stayed", "failed", "ended", "closed"]

TRANSITIONS: dict[ModelState, dict[Event, ModelState]] = {
    "unloaded": {
        "load": "loading",
        "postponed": "unloaded",
        "failed": "failed",
        "ended": "unloaded",
        "closed": "unloaded",
    },
    "loading": {
        "load": "loading",
        "postponed": "unloaded",
        "opened": "ready",
        "died": "restarting",
        "failed": "failed",
        "ended": "unloaded",
        "closed": "unloaded",
    },
    "ready": {"drain": "draining", "died": "restarting", "failed": "failed", "closed": "unloaded"},
    "draining": {
        "stayed": "ready",
        "died": "restarting",
        "failed": "failed",
        "ended": "unloaded",
        "closed": "unloaded",
    },
    "restarting": {
        "opened": "ready",
        "died": "restarting",
        "failed": "failed",
        "ended": "unloaded",
        "closed": "unloaded",
    },
    "failed": {"load": "loading", "failed": "failed", "ended": "unloaded", "closed": "unloaded"},
}

_PUBLISHED: dict[Event, EventKind] = {
    "load": "loading",
    "postponed": "unloaded",
    "opened": "ready",
    "died": "restarting",
    "stayed": "ready",
    "failed": "failed",
    "ended": "unloaded",
}


@define(eq=False)
class Lifecycle:
    """State of one model's worker; modified only on the event loop.

    Attributes:
        name: name of the model.
        instance: number that distinguishes models with the same name.
        publish: called with every change.
        error: reason why the model failed, could not be loaded, or is being restarted.
        progress: share of the current load, 0 to 1; 1 when loaded.
        progress_text: current activity of the load.
    """

    name: str
    instance: int
    publish: Publish
    state: ModelState
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    _changed: asyncio.Event = field(factory=asyncio.Event)

    @property
    def is_settled(self) -> bool:
        """True if the model is neither loading nor restarting."""
        return self.state not in ("loading", "restarting")

    def move(self, event: Event, text: str = "") -> None:
        """Enter the next state and publish the change.

        Args:
            event: an event that the current state has in ``TRANSITIONS``.
            text: reason for it, which is the error shown unless the model stays loaded.
        """
        was, self.state = self.state, TRANSITIONS[self.state][event]
        if event not in ("drain", "stayed"):
            self.error = text or None
            self.progress, self.progress_text = (1.0, "") if self.state == "ready" else (0.0, "")
        self.touch()
        if self.state != was and event in _PUBLISHED:
            self.tell("restarted" if (was, event) == ("restarting", "opened") else _PUBLISHED[event], text)

    def report(self, share: float, text: str, kind: EventKind = "loading") -> None:
        """Record the progress of a load or download. Late reports of one that has ended are dropped."""
        if not self.is_settled:
            self.progress, self.progress_text = share, text
            self.tell(kind, text)

    def tell(self, kind: EventKind, text: str) -> None:
        """Publish an event."""
        event = ModelEvent(kind=kind, model=self.name, instance=self.instance, progress=self.progress, text=text)
        self.publish(event)

    def touch(self) -> None:
        """Wake all waiters for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next change of the state, or for :meth:`touch`."""
        self._changed.clear()
        await self._changed.wait()


@define(eq=False, kw_only=True)
class Drain(Generic[_M]):
    """Unloads one model: a load and running requests finish, new ones wait or are served, then its worker ends.

    Concurrent callers share one unload. Reusable.

    Attributes:
        lifecycle: state of the model, to which ``uses`` and ``waiters`` also belong.
        end_worker: ends the worker, if there still is one; returns when its memory is free.
        on_end: called when the model is unloaded, or stays loaded.
        holds_back: True if new requests wait although the model is loaded.
    """

    lifecycle: Lifecycle
    uses: Uses[_M]
    waiters: Waiters[_M]
    end_worker: Callable[[], Awaitable[None]]
    on_end: Callable[[], None]
    holds_back: bool = False
    _task: asyncio.Task[bool] | None = None
    _is_forced: bool = False  # do not wait for requests

    @property
    def is_under_way(self) -> bool:
        """True if an unload is in progress."""
        return self._task is not None

    @property
    def is_busy(self) -> bool:
        """True if requests use the model or it is loading."""
        return bool(self.uses) or self.lifecycle.state == "loading"

    def begin(self, drain_s: float, *, force: bool = False, holds_back: bool = True) -> asyncio.Task[bool]:
        """Start to unload, or join an unload in progress; the task returns whether the model is unloaded.

        A call with ``force`` and without drain time ends the waiting of an unload in progress.

        Args:
            drain_s: seconds that a load and running requests get.
            force: end those that still run after that with an error; otherwise the model then stays loaded.
            holds_back: let new requests wait until the model is loaded again.
        """
        if self._task is None:
            self._is_forced, self.holds_back = force and drain_s <= 0, holds_back
            self._task = asyncio.create_task(self._leave(drain_s, force))
            self._enter_draining()
        elif force and drain_s <= 0:
            self._is_forced = True
            self.lifecycle.touch()
        return self._task

    async def cancel(self) -> None:
        """Stop waiting; the model stays as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _enter_draining(self) -> None:
        """Drain a worker that is ready: at first, or after the load or restart that it was in."""
        if self.lifecycle.state == "ready":
            self.lifecycle.move("drain")

    async def _leave(self, drain_s: float, force: bool) -> bool:
        try:
            if not await self._wait_idle(drain_s) and not (force or self._is_forced):
                return False
            # Nothing is awaited between here and the end of the leases, so no request can begin.
            self.holds_back = True
            unloaded = ModelUnloaded(f"The model {self.lifecycle.name!r} was unloaded; try again.")
            self.uses.end_all(unloaded)
            if self._is_forced:
                self.waiters.refuse(unloaded)
            await self.end_worker()
            return True
        finally:
            self._task, self.holds_back = None, False
            self.on_end()

    async def _wait_idle(self, drain_s: float) -> bool:
        """Wait for the end of a load, which serves the requests that wait for it, and then for the end of requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.lifecycle.state == "loading" and not self._is_forced:
                    await self.lifecycle.change()
                self._enter_draining()
                if self.uses and self.lifecycle.state == "draining":
                    self.lifecycle.tell("draining", f"{len(self.uses)} requests are running")
                while self.uses and not self._is_forced:
                    await self.lifecycle.change()
                    self._enter_draining()
        self._enter_draining()
        return not self.is_busy
