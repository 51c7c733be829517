"""Calls to a worker: messages with one answer each, matched by call number."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.workers.messages import (
    Cached,
    CallFailed,
    Detokenized,
    StageBegan,
    Stats,
    ThinkingStopped,
    Tokenized,
    View,
)
from enginehouse.workers.requests import WorkObserver

__all__ = ["NO_CALL", "Answer", "Calls", "settle"]

Answer = StageBegan | Cached | CallFailed | Detokenized | Stats | ThinkingStopped | Tokenized | View

NO_CALL = -1
"""Call number of pings, whose answer is not delivered; its arrival is enough."""


class Calls:
    """Calls that the worker has not answered, including those whose caller has gone. Used on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, tuple[asyncio.Future[Any], WorkObserver | None]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def next_number(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    async def answer_to(self, number: int, observer: WorkObserver | None) -> Any:
        """Wait for the answer; raises the error with which the call was refused."""
        answer = self._loop.create_future()
        self._open[number] = answer, observer
        return await answer

    def handle(self, message: Answer) -> None:
        """Handle the start or the answer of a call; an answer that is no longer awaited is dropped."""
        if isinstance(message, StageBegan):
            _, observer = self._open.get(int(message.work), (None, None))
            if observer is not None:
                observer.stage_began(message.stage)
            return
        future, observer = self._open.pop(message.call, (None, None))
        if future is None:
            return
        if observer is not None:
            observer.left()
        match message:
            case Tokenized():
                settle(future, message.token_ids)
            case Detokenized():
                settle(future, message.pieces)
            case Stats():
                settle(future, message.stats)
            case Cached():
                settle(future, message.num_tokens)
            case View():
                settle(future, message.view)
            case ThinkingStopped():
                settle(future, message.num_choices)
            case CallFailed():
                settle(future, message.failure.to_error())

    def fail_all(self, error: EnginehouseError) -> None:
        """Fail all open calls; no more answers will come."""
        still_open, self._open = self._open, {}
        for future, observer in still_open.values():
            if observer is not None and not isinstance(error, WorkerDied):
                observer.left()
            settle(future, error)


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future its result or error, unless it has one or its waiter was cancelled."""
    if future.done():
        return
    if isinstance(outcome, EnginehouseError):
        future.set_exception(outcome)
        future.exception()  # marks it as retrieved, in case it is never awaited
    else:
        future.set_result(outcome)
