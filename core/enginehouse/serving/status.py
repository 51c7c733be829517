"""State of a model: phases, status, and events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from attrs import define, field, frozen

from enginehouse.contract.types import ModelInfo

__all__ = [
    "Condition",
    "EventKind",
    "ModelEvent",
    "ModelEvents",
    "ModelState",
    "ModelStatus",
    "Phase",
    "Publish",
    "Subscription",
]

EventKind = Literal[
    "loading", "ready", "draining", "unloaded", "failed", "restarting", "restarted", "replaced", "removed", "added"
]

_MAX_WAITING = 1000


@frozen(kw_only=True)
class ModelEvent:
    """An event of a model.

    Attributes:
        kind: ``loading`` occurs several times per load, ``restarted`` replaces ``ready`` after a worker's death;
            ``added``, ``replaced`` and ``removed`` result from a configuration change.
        instance: number that distinguishes models with the same name, see ``ModelStatus``; for ``replaced`` that of the
            new one, which may have loaded before.
        progress: share of a load, 0 to 1.
        text: current activity of a load, or the reason for the event.
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


@define(eq=False)
class Subscription:
    """Events for one listener. ``num_lost`` counts events that were dropped because it was too slow."""

    num_lost: int = 0
    _waiting: asyncio.Queue[ModelEvent] = field(factory=lambda: asyncio.Queue(_MAX_WAITING))

    def push(self, event: ModelEvent) -> None:
        """Add an event; if the queue is full, the oldest one is dropped."""
        if self._waiting.full():
            self._waiting.get_nowait()
            self.num_lost += 1
        self._waiting.put_nowait(event)

    async def next(self) -> ModelEvent:
        """Wait for the next event."""
        return await self._waiting.get()

    async def __aiter__(self) -> AsyncIterator[ModelEvent]:
        """Iterate over events as they arrive; never ends by itself."""
        while True:
            yield await self.next()


class ModelEvents:
    """Passes every event to every listener."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    def publish(self, event: ModelEvent) -> None:
        """Pass an event to all listeners."""
        for subscription in self._subscriptions:
            subscription.push(event)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Receive events within the block."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)


Phase = Literal["unloaded", "loading", "ready", "restarting", "failed"]


@define(eq=False)
class Condition:
    """State of one model; modified only on the event loop.

    Attributes:
        name: name of the model.
        instance: number that distinguishes models with the same name.
        publish: called with every change.
        error: reason why the model failed, could not be loaded, or is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: current activity of the load.
        is_closing: True if the model is being unloaded, so that the end of its engine is expected.
    """

    name: str
    instance: int
    publish: Publish
    phase: Phase
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    is_closing: bool = False
    _changed: asyncio.Event = field(factory=asyncio.Event)

    @property
    def is_settled(self) -> bool:
        """True if the model is neither loading nor restarting."""
        return self.phase not in ("loading", "restarting")

    def become(self, phase: Phase, error: str | None = None) -> None:
        """Enter a phase and publish the change."""
        was, self.phase, self.error = self.phase, phase, error
        self.progress, self.progress_text = (1.0, "") if phase == "ready" else (0.0, "")
        self.touch()
        if phase == was or (phase == "restarting" and self.is_closing):
            return
        kinds: dict[Phase, EventKind] = {"ready": "restarted"} if was == "restarting" else {}
        self.tell(kinds.get(phase, phase), error or "")

    def report(self, share: float, text: str) -> None:
        """Record the progress of a load. Late reports of a load that has ended are dropped."""
        if not self.is_settled:
            self.progress, self.progress_text = share, text
            self.tell("loading", text)

    def tell(self, kind: EventKind, text: str) -> None:
        """Publish an event."""
        event = ModelEvent(kind=kind, model=self.name, instance=self.instance, progress=self.progress, text=text)
        self.publish(event)

    def touch(self) -> None:
        """Wake all waiters for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next change of the phase, or for :meth:`touch`."""
        self._changed.clear()
        await self._changed.wait()


ModelState = Literal["unloaded", "loading", "ready", "draining", "restarting", "failed"]


@frozen(kw_only=True)
class ModelStatus:
    """Status of one model at one time.

    Attributes:
        instance: number of the model among all that this server has had; a new configuration may replace it by another
            one with the same name.
        created: Unix time in seconds when this server began to serve the model.
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
    """

    name: str
    instance: int
    state: ModelState
    aliases: tuple[str, ...]
    created: int
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
