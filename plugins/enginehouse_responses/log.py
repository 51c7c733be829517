"""The events of responses in progress and of recent ones: what resumed streams read.

A stream is written once, into its log, while the generation goes on; clients are readers of it. The logs of all
responses share one bound of bytes: those of the oldest complete responses are dropped first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable

import msgspec

from enginehouse.contract.surface import Chunk

__all__ = ["EventLog", "EventLogs"]


_encode = msgspec.json.Encoder().encode


class EventLog:
    """The events of one response, in order.

    Attributes:
        is_complete: the last event is there.
        num_bytes: of all events.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._news: asyncio.Event | None = None  # if readers wait

    def add(self, chunks: Iterable[Chunk | bytes]) -> list[bytes]:
        """Append events; returns them encoded."""
        added = []
        for chunk in chunks:  # one for each token
            event = chunk if isinstance(chunk, bytes) else _encode(chunk)
            self._events.append(event)
            self.num_bytes += len(event)
            added.append(event)
        if self._news is not None:
            self._tell()
        return added

    def end(self) -> None:
        """Mark the end; readers end, too."""
        self.is_complete = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events whose number is greater than ``after``, until the response is complete."""
        at = max(0, after + 1)
        while True:
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.is_complete:
                return
            self._news = self._news or asyncio.Event()
            await self._news.wait()


class EventLogs:
    """The logs by response id, in order of creation."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def open(self, response_id: str) -> EventLog:
        """Return a new log."""
        log = self._logs[response_id] = EventLog()
        return log

    def find(self, response_id: str) -> EventLog | None:
        """Return the log of a response; None if it has none, or no longer."""
        return self._logs.get(response_id)

    def close(self, response_id: str) -> None:
        """End the log of a response, if it has one, and drop complete ones until the rest fits."""
        log = self._logs.get(response_id)
        if log is not None:
            log.end()
        total = sum(log.num_bytes for log in self._logs.values())
        for one, older in list(self._logs.items()):
            if total <= self._max_bytes:
                return
            if older.is_complete:
                total -= older.num_bytes
                del self._logs[one]

    def drop(self, response_id: str) -> None:
        """Forget the log of a response."""
        self._logs.pop(response_id, None)
