"""State of a model: loading, ready, draining, failed; with its events and what listings show."""

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


Phase = Literal["unloaded", "loading", "ready", "restarting", "failed"]


@define(eq=False)
class Condition:
    """The condition of one model; changed on the event loop only.

    Attributes:
        name: the model's.
        instance: which of those that have had this name it is.
        publish: told of every change.
        error: why the model failed, could not be loaded, or is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: what the current load is doing.
        is_closing: the model is on its way out, so that the end of its engine is no news.
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
        """Whether the model neither loads nor restarts."""
        return self.phase not in ("loading", "restarting")

    def become(self, phase: Phase, error: str | None = None) -> None:
        """Enter a phase, and tell of it."""
        was, self.phase, self.error = self.phase, phase, error
        self.progress, self.progress_text = (1.0, "") if phase == "ready" else (0.0, "")
        self.touch()
        if phase == was or (phase == "restarting" and self.is_closing):
            return
        kinds: dict[Phase, EventKind] = {"ready": "restarted"} if was == "restarting" else {}
        self.tell(kinds.get(phase, phase), error or "")

    def report(self, share: float, text: str) -> None:
        """Note a load's progress. Late reports of a load that has ended are dropped."""
        if not self.is_settled:
            self.progress, self.progress_text = share, text
            self.tell("loading", text)

    def tell(self, kind: EventKind, text: str) -> None:
        """Publish an event."""
        event = ModelEvent(kind=kind, model=self.name, instance=self.instance, progress=self.progress, text=text)
        self.publish(event)

    def touch(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for the next change, of the phase or of what :meth:`touch` stands for."""
        self._changed.clear()
        await self._changed.wait()


ModelState = Literal["unloaded", "loading", "ready", "draining", "restarting", "failed"]


@frozen(kw_only=True)
class ModelStatus:
    """What is known about one model now.

    Attributes:
        instance: number of the model among all that this server has had; a new configuration may replace it by another
            one of the same name.
        created: Unix time in seconds when this server began to serve the model.
        info: of the last successful load; None before it.
        error: why the model failed or could not be loaded, or why it is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: what the current load is doing.
        backend: name of the chosen backend; None before the choice.
        reason: why this backend was chosen.
        num_restarts: how often its worker died and was started again.
        on_demand: its load was begun for a request, so requests wait for it.
        num_running: requests that use it.
        num_waiting: requests that wait for it to be loaded.
        idle_s: seconds since its last use; None while it is used or not loaded.
        memory_bytes: memory that it holds by its backend's estimate, on ``device``; None when it holds none.
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
