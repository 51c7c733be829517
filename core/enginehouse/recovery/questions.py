"""Calls to an engine other than generations, as work items: repeated if the worker dies before it has answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import EngineRequest
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.work import Work

__all__ = ["Question"]

_T = TypeVar("_T")


class Question(Work):
    """One call.

    Args:
        model_work: the work of the called model.
        request: the caller, and the content of the call as the prompt of a request.
        timeout_s: maximum time without a worker.
        written: see :class:`Work`.
    """

    def __init__(self, model_work: ModelWork, request: EngineRequest, timeout_s: float, written: Sequence[str]) -> None:
        super().__init__(request.caller, model_work.next_arrival(), request, timeout_s, written)
        self._model_work = model_work

    async def answer(self, method: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Call a method of :class:`enginehouse.workers.client.WorkerEngine` until there is an answer.

        Raises:
            RequestKillsWorker: workers die of it.
            EngineDead: there was no worker for too long.
            EnginehouseError: any error that the engine raises.
        """
        try:
            async with self.bounded(from_now=False):
                while True:
                    engine = await self._model_work.admission(self)
                    try:
                        return await method(engine, *args, observer=self)
                    except WorkerDied:
                        await self._model_work.death(engine)
                    except EnginehouseError:
                        self.left()
                        raise
        finally:
            self._model_work.over(self)

    def left(self) -> None:
        """The worker has answered."""
        self._model_work.answered(self)
