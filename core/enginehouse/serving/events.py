"""What happens to models, as it happens: one stream of events for all who listen.

Models publish, the admin API and the command line listen. Nobody waits for a listener: one that does not read loses
its oldest events, and is told how many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from attrs import define, field, frozen

__all__ = ["EventKind", "ModelEvent", "ModelEvents", "Publish", "Subscription"]

EventKind = Literal[
    "loading", "ready", "draining", "unloaded", "failed", "restarting", "restarted", "replaced", "removed", "added"
]

_MAX_WAITING = 1000


@frozen(kw_only=True)
class ModelEvent:
    """One thing that happened to a model.

    Attributes:
        kind: ``loading`` comes several times per load, ``restarted`` stands for ``ready`` after a worker's death;
            ``added``, ``replaced`` and ``removed`` come from a change of the configuration.
        instance: which of the models that have had this name it is about, see
            ``ModelStatus``; with ``replaced`` the new one, which may have loaded before.
        progress: share of a load, 0 to 1.
        text: what a load is doing, or why this happened.
        at: Unix time in seconds.
    """

    kind: EventKind
    model: str
    instance: int = 1
    progress: float = 0.0
    text: str = ""
    at: float = field(factory=time.time)


Publish = Callable[[ModelEvent], None]
"""Takes an event; called on the event loop, returns at once."""


@define(eq=False)
class Subscription:
    """The events of one listener. ``num_lost`` counts those that it was too slow for."""

    num_lost: int = 0
    _waiting: asyncio.Queue[ModelEvent] = field(factory=lambda: asyncio.Queue(_MAX_WAITING))

    def push(self, event: ModelEvent) -> None:
        """Add an event, perhaps in the place of the oldest one."""
        if self._waiting.full():
            self._waiting.get_nowait()
            self.num_lost += 1
        self._waiting.put_nowait(event)

    async def next(self) -> ModelEvent:
        """The next event, waited for."""
        return await self._waiting.get()

    async def __aiter__(self) -> AsyncIterator[ModelEvent]:
        """Events as they come; never ends by itself."""
        while True:
            yield await self.next()


class ModelEvents:
    """Hands every event to every listener."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    def publish(self, event: ModelEvent) -> None:
        """Tell all listeners."""
        for subscription in self._subscriptions:
            subscription.push(event)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Listen while the block runs."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
