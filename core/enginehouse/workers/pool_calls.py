"""Pooling requests that a worker has not answered, on the server side: calls that have a place in the model's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from enginehouse.contract.errors import InvalidRequest, Overloaded
from enginehouse.contract.types import PoolingRequest, PoolingResult
from enginehouse.workers.messages import CallFailed, CancelCall, Pool, PoolAccepted, Pooled, StageBegan, ToWorker
from enginehouse.workers.request_queue import RequestQueue
from enginehouse.workers.request_table import CallMessage, Calls, WorkObserver


class PoolCalls:
    """Pooling requests by call number. Used on the event loop.

    Args:
        calls: all calls of the worker, which wait for the answers.
        request_queue: the queue of the model, in which the requests are.
        send: sends a message to the worker.
    """

    def __init__(self, calls: Calls, request_queue: RequestQueue, send: Callable[[ToWorker], None]) -> None:
        self._calls = calls
        self._request_queue = request_queue
        self._send = send
        self._request_ids: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._request_ids)

    async def answer_to(
        self, request: PoolingRequest, observer: WorkObserver | None, on_sent: Callable[[], None]
    ) -> PoolingResult:
        """Send a request and wait for its rows; cancelling this drops it in the worker.

        Args:
            on_sent: called when the worker has work.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: too many tokens wait.
            EngineDead: the worker is gone.
        """
        number = self._calls.next_number()
        try:
            self._send(Pool(number, request))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, request.path) from error
        self._request_ids[number] = request.request_id
        on_sent()
        try:
            result: PoolingResult = await self._calls.answer_to(number, observer)
        except (asyncio.CancelledError, Overloaded):
            if number in self._request_ids:
                self._send(CancelCall(number))
            raise
        return result

    def accepted(self, message: PoolAccepted) -> None:
        """Refuse a request that is too long to wait with the others, which is known once it is tokenized."""
        try:
            self._request_queue.check_tokens(self._request_ids.get(message.call, ""), message.num_tokens)
        except Overloaded as error:
            self._calls.refuse(message.call, error)

    def note(self, message: CallMessage) -> None:
        """Note the start or the answer of a call, which may be another one."""
        if isinstance(message, StageBegan) and message.stage == "request":
            self._request_queue.start(self._request_ids.get(int(message.work), ""))
        elif isinstance(message, Pooled | CallFailed):
            self._request_ids.pop(message.call, None)

    def clear(self) -> None:
        """Forget all: the worker is gone."""
        self._request_ids.clear()
