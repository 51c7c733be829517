"""What a model is doing: its phase, how far a load is, why something went wrong; and the events that tell of it.

Part of ``served``, which decides when the phase changes. Knows no engines and no requests.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from attrs import define, field

from enginehouse.serving.events import EventKind, ModelEvent, Publish

__all__ = ["Condition", "Phase"]

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
