"""Keeps a model's worker running: open, watch until it dies, open again after a delay, give up after repeated failures.

Part of ``served``, which knows how to open an engine and the errors of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from attrs import define, field, frozen

from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import EngineDead, EnginehouseError, ModelLoadError, PluginFailed, ResourcesExhausted
from enginehouse.serving.lifecycle import Lifecycle
from enginehouse.serving.opening import OpenEngine
from enginehouse.workers.client import WorkerEngine

_log = logging.getLogger(__name__)

_MAX_SHORTAGE_DELAY_S = 2.0


@frozen(kw_only=True)
class RestartPolicy:
    """Restart settings; times in seconds.

    Attributes:
        first_delay_s: pause before the second restart in a row; the first restart is immediate, because most deaths are
            single accidents and clients wait for it.
        factor: growth of each further pause.
        max_delay_s: longest pause.
        max_failed_starts: number of starts in a row without becoming ready after which the model is given up. A model
            that does become ready is never given up, however often it dies: in that case only some requests kill it.
        stable_after_s: time ready after which the count of restarts in a row is reset.
    """

    first_delay_s: float = 0.5
    factor: float = 2.0
    max_delay_s: float = 30.0
    max_failed_starts: int = 5
    stable_after_s: float = 60.0


@define
class Restarts:
    """Restart record of one model."""

    policy: RestartPolicy = field(factory=RestartPolicy)
    num_in_a_row: int = 0
    num_failed_starts: int = 0
    total: int = 0

    def died(self, ready_s: float | None, *, is_of_work: bool = False) -> float | None:
        """Record a death and return the delay before the next start; None means to give up.

        Args:
            ready_s: time for which the model was ready; None if it never was.
            is_of_work: True if it died while working and ``replay`` identifies the responsible work: then the pause
                applies to its caller, and other callers are not delayed.
        """
        if ready_s is None:
            self.num_failed_starts += 1
            if self.num_failed_starts >= self.policy.max_failed_starts:
                return None
        else:
            self.num_failed_starts = 0
            if ready_s >= self.policy.stable_after_s:
                self.num_in_a_row = 0
        self.total += 1
        if is_of_work:
            return 0.0
        self.num_in_a_row += 1
        if self.num_in_a_row == 1:
            return 0.0
        # The exponent is bounded so that a long series of deaths cannot overflow a float.
        exponent = min(self.num_in_a_row - 2, 64)
        return min(self.policy.first_delay_s * self.policy.factor**exponent, self.policy.max_delay_s)


@define(eq=False, kw_only=True)
class Supervisor:
    """Keeps the engine of one model open.

    Attributes:
        lifecycle: state of the model, to which the ``restarts`` record also belongs.
        open: opens the next engine.
        on_ready: called with an engine that is ready to serve.
        on_gone: called when it no longer serves, before any request gets the error.
        finds_culprits: returns True if the work that kills a worker is identified.
    """

    lifecycle: Lifecycle
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
            self.lifecycle.move("died", death)
            _log.warning("model %s: %s; restarting in %.1f s", self.lifecycle.name, death, delay_s)
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
        try:
            self.on_ready(opened.engine)
            death = await self._until_dead(opened.died)
        finally:
            ready_s = time.monotonic() - began
            self.on_gone()
            with contextlib.suppress(PluginFailed):
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
                    _log.warning("model %s: %s; trying again until it can be", self.lifecycle.name, error.message)
                self.lifecycle.report(0.0, error.message)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_SHORTAGE_DELAY_S)

    async def _until_dead(self, died: asyncio.Future[EngineDead]) -> str:
        """Wait for the death of the engine and return the cause. The state changes before any request gets the error.

        Cancelling this closes the model and says nothing about its engine.
        """
        dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def note(ended: asyncio.Future[EngineDead]) -> None:
            reason = ended.result().message
            self.on_gone()
            self.lifecycle.move("died", reason)
            if not dead.done():
                dead.set_result(reason)

        died.add_done_callback(note)
        try:
            return await dead
        finally:
            died.remove_done_callback(note)
