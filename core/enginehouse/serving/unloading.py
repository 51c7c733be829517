"""Unloading a model: a load and running requests finish, new ones wait or are served, then its worker ends.

Part of ``served``, which knows what a worker is. Concurrent callers share one unload.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from attrs import define

from enginehouse.contract.errors import ModelUnloaded
from enginehouse.serving.leases import Uses, Waiters
from enginehouse.serving.status import Condition

__all__ = ["Departure"]

_M = TypeVar("_M")


@define(eq=False, kw_only=True)
class Departure(Generic[_M]):
    """Unloads one model: drain, then end the worker. Reusable.

    Attributes:
        condition: state of the model, to which ``uses`` and ``waiters`` also belong.
        end_worker: ends the worker, if there still is one; returns when its memory is free.
        on_end: called when the model is unloaded, or stays loaded.
        holds_back: True if new requests wait although the model is loaded.
    """

    condition: Condition
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
        return bool(self.uses) or self.condition.phase == "loading"

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
        elif force and drain_s <= 0:
            self._is_forced = True
            self.condition.touch()
        return self._task

    async def cancel(self) -> None:
        """Stop waiting; the model stays as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _leave(self, drain_s: float, force: bool) -> bool:
        try:
            if not await self._wait_idle(drain_s) and not (force or self._is_forced):
                return False
            # There is no await between here and the end of the leases, so no request can begin.
            self.holds_back = True
            unloaded = ModelUnloaded(f"The model {self.condition.name!r} was unloaded; try again.")
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
                while self.condition.phase == "loading" and not self._is_forced:
                    await self.condition.change()
                if self.uses and self.condition.phase == "ready":
                    self.condition.tell("draining", f"{len(self.uses)} requests are running")
                while self.uses and not self._is_forced:
                    await self.condition.change()
        return not self.is_busy
