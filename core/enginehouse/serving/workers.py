"""Engine lifecycle of a model: open, watch until it dies, reopen, and give up after repeated failures.

Part of ``served``, which knows how to open an engine and what its requests are told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from attrs import define

from enginehouse.contract.backend import Engine
from enginehouse.contract.errors import EngineDead, EnginehouseError, ModelLoadError, ResourcesExhausted
from enginehouse.serving.opening import OpenEngine
from enginehouse.serving.restarts import Restarts
from enginehouse.serving.status import Condition
from enginehouse.workers.client import WorkerEngine

__all__ = ["Workers"]

_log = logging.getLogger(__name__)

_MAX_SHORTAGE_DELAY_S = 2.0


@define(eq=False, kw_only=True)
class Workers:
    """Keeps an engine open.

    Attributes:
        condition: state of the model, to which the ``restarts`` record also belongs.
        open: opens the next engine.
        on_ready: called with an engine that is ready to serve.
        on_gone: called when it no longer serves, before any request is told.
        finds_culprits: returns True if the work that kills a worker is identified.
    """

    condition: Condition
    restarts: Restarts
    open: Callable[[], Awaitable[OpenEngine]]
    on_ready: Callable[[Engine], None]
    on_gone: Callable[[], None]
    finds_culprits: Callable[[], bool]

    async def run(self) -> None:
        """Open an engine whenever there is none; cancel this to close the current one.

        Raises:
            EnginehouseError: the first one was refused, or too many in a row have failed.
        """
        has_served = False
        while True:
            death, ready_s, is_of_work = await self._serve_once(has_served)
            has_served = has_served or ready_s is not None
            delay_s = self.restarts.died(ready_s, is_of_work=is_of_work and self.finds_culprits())
            if delay_s is None:
                num_starts = self.restarts.num_failed_starts
                raise ModelLoadError(f"given up after {num_starts} failed starts; the last one: {death}")
            self.condition.become("restarting", death)
            _log.warning("model %s: %s; restarting in %.1f s", self.condition.name, death, delay_s)
            await asyncio.sleep(delay_s)

    async def _serve_once(self, has_served: bool) -> tuple[str, float | None, bool]:
        """Open an engine and wait until it dies.

        Args:
            has_served: True if an earlier engine has served.

        Returns:
            The cause of death, the seconds for which it was ready (None if it never was), and whether it was working.

        Raises:
            EnginehouseError: the first load was refused; a backend would refuse it again.
        """
        try:
            opened = await self._open()
        except EngineDead as error:
            return error.message, None, False
        except EnginehouseError as error:
            if not has_served:
                raise
            return error.message, None, False
        began = time.monotonic()
        death = "the server is shutting down"
        try:
            self.on_ready(opened.engine)
            death = await self._until_dead(opened.died)
        finally:
            ready_s = time.monotonic() - began
            self._lose(death)
            await opened.engine.close()
        return death, ready_s, isinstance(opened.engine, WorkerEngine) and opened.engine.has_died_working

    async def _open(self) -> OpenEngine:
        """Open the next engine; waits while the system is short of resources, which is not the model's fault."""
        delay_s = 0.1
        while True:
            try:
                return await self.open()
            except ResourcesExhausted as error:
                if delay_s < _MAX_SHORTAGE_DELAY_S:  # afterwards it has been logged often enough
                    _log.warning("model %s: %s; trying again until it can be", self.condition.name, error.message)
                self.condition.report(0.0, error.message)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_SHORTAGE_DELAY_S)

    async def _until_dead(self, died: asyncio.Future[EngineDead]) -> str:
        """Wait for the death of the engine and return the cause. The state changes before any request is told.

        Cancelling this closes the model and says nothing about its engine.
        """
        dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def note(ended: asyncio.Future[EngineDead]) -> None:
            reason = ended.result().message
            self._lose(reason)
            if not dead.done():
                dead.set_result(reason)

        died.add_done_callback(note)
        try:
            return await dead
        finally:
            died.remove_done_callback(note)

    def _lose(self, death: str) -> None:
        self.on_gone()
        self.condition.become("restarting", death)
