"""Status of a model at one time, and events about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from attrs import define, field, frozen

from enginehouse.contract.calls import ModelState
from enginehouse.contract.types import ModelInfo

__all__ = [
    "EventKind",
    "ModelEvent",
    "ModelEvents",
    "ModelState",
    "ModelStatus",
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
