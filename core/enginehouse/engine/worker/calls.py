"""Questions to a worker that get one answer each, told apart by their numbers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from enginehouse.engine.worker.messages import CallFailed, Detokenized, Stats, ThinkingStopped, Tokenized, View
from enginehouse.errors import EnginehouseError

__all__ = ["NOBODY", "Answer", "Calls", "settle"]

Answer = CallFailed | Detokenized | Stats | ThinkingStopped | Tokenized | View

NOBODY = -1
"""The number of questions whose answer nobody reads; that there is one says enough."""


class Calls:
    """The questions that are not answered yet. Lives on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def next_number(self) -> int:
        """The number of a new question."""
        return next(self._numbers)

    async def answer_to(self, number: int) -> Any:
        """Wait for an answer; raises what the question was refused with."""
        answer = self._waiting[number] = self._loop.create_future()
        try:
            return await answer
        finally:
            del self._waiting[number]

    def handle(self, message: Answer) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        future = self._waiting.get(message.call)
        if future is None:
            return
        match message:
            case Tokenized():
                settle(future, message.token_ids)
            case Detokenized():
                settle(future, message.pieces)
            case Stats():
                settle(future, message.stats)
            case View():
                settle(future, message.view)
            case ThinkingStopped():
                settle(future, message.num_choices)
            case CallFailed():
                settle(future, message.failure.to_error())

    def fail_all(self, error: EnginehouseError) -> None:
        """No more answers come."""
        for future in self._waiting.values():
            settle(future, error)


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future its result or error, unless it has one or its waiter was cancelled."""
    if future.done():
        return
    if isinstance(outcome, EnginehouseError):
        future.set_exception(outcome)
        future.exception()  # counts as seen even when nobody waits for it any more
    else:
        future.set_result(outcome)
