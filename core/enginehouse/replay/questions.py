"""Calls to an engine other than generations, as work items: repeated if the worker dies before it has answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import EngineRequest
from enginehouse.replay.model_work import ModelWork
from enginehouse.replay.work import Work
from enginehouse.workers.messages import Stage

__all__ = ["Ask", "Question"]

_T = TypeVar("_T")

Ask = Callable[..., Awaitable[_T]]
"""Calls the given engine; passes keyword arguments on to the engine's method."""


class Question(Work, Generic[_T]):
    """One call. Also its own :class:`enginehouse.workers.WorkObserver`.

    Args:
        ask: calls an engine.
        place: the work of the called model.
        request: the caller, and the content of the call as the prompt of a request.
        timeout_s: maximum time without a worker.
        written: see :class:`Work`.
    """

    def __init__(
        self, ask: Ask[_T], place: ModelWork, request: EngineRequest, timeout_s: float, written: Sequence[str]
    ) -> None:
        super().__init__(request.caller, place.next_arrival(), request, timeout_s, written)
        self._ask = ask
        self._place = place

    async def answer(self) -> _T:
        """Call until there is an answer.

        Raises:
            RequestKillsWorker: workers die of it.
            EngineDead: there was no worker for too long.
            EnginehouseError: any error that the engine raises.
        """
        try:
            async with self.bounded(from_now=False):
                return await self._answer()
        finally:
            self._place.over(self)

    async def _answer(self) -> _T:
        while True:
            engine = await self._place.admission(self)
            try:
                return await self._ask(engine, observer=self)
            except WorkerDied:
                await self._place.death(engine)
            except EnginehouseError:
                self.left()
                raise

    def begun(self, stage: Stage) -> None:
        """The worker begins to work on it."""
        self.stage = stage

    def left(self) -> None:
        """The worker has answered."""
        self._place.answered(self)
