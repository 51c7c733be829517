"""A work item: a request or a call, as far as the search for culprits needs to know it.

Everything that runs in a worker on behalf of a caller is a work item: requests, tokenize and detokenize calls, engine
snapshots. Modified by :class:`enginehouse.recovery.quarantine.Quarantine` and by messages of its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from enum import Enum

from enginehouse.contract.errors import PluginFailed, RequestKillsWorker, WorkerNotBack
from enginehouse.contract.types import EngineRequest
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Stage
from enginehouse.workers.requests import WorkObserver

__all__ = ["State", "Work"]


class State(Enum):
    """State of a work item; see ``TRANSITIONS`` in :mod:`enginehouse.recovery.quarantine`."""

    WAITING = "waiting"  # outside
    RUNNING = "running"  # in a worker, together with others
    SUSPECT = "suspect"  # outside: a worker died while it worked on this
    ISOLATED = "isolated"  # alone in a worker: its isolation run
    CULPRIT = "culprit"  # a worker died in its isolation run
    ENDED = "ended"


class Work(WorkObserver):
    """One work item. It observes the worker's work on it.

    Args:
        caller: the caller; all callers without API keys are one.
        arrival: arrival number, increasing.
        request: the engine's input; for a call, its text or token ids.
        written: the texts of its prompt that its caller wrote, by which it is recognised on other API routes.
        timeout_s: maximum time without a worker.

    Attributes:
        state: current state.
        stage: the part of it on which its worker is working.
        engine: the worker that holds it, even after its client has left; None while it is outside.
        num_suspicions: number of times it became suspect without an explanation being found.
        num_excused: number of deaths from outside from which it was excused.
        is_over: True if its client expects nothing more.
        is_answered: True if it ended by itself, whether its client waited for that or not.
        num_plugin_deaths: number of workers that ended in a call of a plugin while they worked on it.
        refusal: reason why it may not enter a worker again.
    """

    def __init__(
        self, caller: str, arrival: int, request: EngineRequest, timeout_s: float, written: Sequence[str] = ()
    ) -> None:
        self.caller = caller
        self.arrival = arrival
        self.request = request
        self.written = tuple(written)
        self.state = State.WAITING
        self.stage: Stage = "waiting"
        self.engine: WorkerEngine | None = None
        self.num_suspicions = 0
        self.num_excused = 0
        self.is_over = False
        self.is_answered = False
        self.num_plugin_deaths = 0
        self.refusal: RequestKillsWorker | PluginFailed | None = None
        self._timeout_s = timeout_s
        self._limit: asyncio.Timeout | None = None

    @property
    def num_tokens(self) -> int:
        """Progress: number of tokens of its answer."""
        return 0

    def stage_began(self, stage: Stage) -> None:
        """The worker starts a stage of it."""
        self.stage = stage

    def lost(self) -> None:
        """The worker has died: the item must find another one."""

    def step_aside(self) -> None:
        """The item has passed its isolation run: it must leave the worker to the next suspect, and return later."""

    # -- time without a worker ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def bounded(self, *, from_now: bool) -> AsyncIterator[None]:
        """A context in which the item waits for workers, limited in time.

        Args:
            from_now: True if the time limit starts now; otherwise it starts with :meth:`start_limit`.

        Raises:
            EngineDead: it took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s if from_now else None) as self._limit:
                yield
        except TimeoutError:
            message = f"The model stopped working and was not back within {self._timeout_s:g} s; try again later."
            raise WorkerNotBack(message) from None
        finally:
            self._limit = None

    @property
    def is_bounded(self) -> bool:
        """True if it is waiting for a worker, or was just submitted to one."""
        return self._limit is not None

    def start_limit(self) -> None:
        """Start the time limit for waiting; a repeated call has no effect."""
        if self._limit is not None and self._limit.when() is None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
