"""A piece of work: a request or a question, as far as the search for culprits needs to know it.

Everything that runs in a worker on behalf of a caller is one: requests, tokens of a text, texts of tokens, pictures of
an engine. Changed by :class:`enginehouse.replay.quarantine.Quarantine` and by what its worker says of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from enum import Enum

from enginehouse.contract.errors import RequestKillsWorker, WorkerNotBack
from enginehouse.contract.types import EngineRequest
from enginehouse.workers import Stage, WorkerEngine

__all__ = ["State", "Work"]


class State(Enum):
    """Where a piece of work is; see ``TRANSITIONS`` in :mod:`enginehouse.replay.quarantine`."""

    WAITING = "waiting"  # outside
    RUNNING = "running"  # in a worker, beside others
    SUSPECT = "suspect"  # outside: a worker died while it worked on this
    ISOLATED = "isolated"  # alone in a worker: its isolation run
    CULPRIT = "culprit"  # a worker died in its isolation run
    ENDED = "ended"


class Work:
    """One piece of work.

    Args:
        caller: whose it is; all callers without keys are one.
        arrival: grows from one to the next.
        request: what the engine is given; of a question, its text or token ids.
        written: the texts of its prompt that its caller has written, by which it is known at another address.
        timeout_s: how long it may be without a worker.

    Attributes:
        state: where it is.
        stage: what of it its worker is working on.
        engine: the worker that holds it, also after its client has left; None while it is outside.
        num_suspicions: how often it came under suspicion without an explanation being found.
        num_forgiven: how often its worker was killed from outside, of which it was not suspected.
        is_over: its client expects nothing more.
        is_answered: it came to its own end, whether its client waited for that or not.
        refusal: why it does not enter a worker any more.
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
        self.num_forgiven = 0
        self.is_over = False
        self.is_answered = False
        self.refusal: RequestKillsWorker | None = None
        self._timeout_s = timeout_s
        self._limit: asyncio.Timeout | None = None

    @property
    def num_tokens(self) -> int:
        """How far it has come: tokens of its answer."""
        return 0

    def lost(self) -> None:
        """Its worker has died: it must find another one."""

    def step_aside(self) -> None:
        """It has passed its isolation run: leave the worker to the next suspect, and come back later."""

    # -- its time without a worker -----------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def bounded(self, *, from_now: bool) -> AsyncIterator[None]:
        """A block in which it waits for workers, not longer than it may.

        Args:
            from_now: the time runs already; else from :meth:`start_limit` on.

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
        """Whether it is waiting for a worker, or was just given to one."""
        return self._limit is not None

    def start_limit(self) -> None:
        """Waiting begins that must end some time; harmless when it has begun."""
        if self._limit is not None and self._limit.when() is None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
