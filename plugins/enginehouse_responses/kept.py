"""Responses that are kept: stored from their beginning, with a log of their events, and shown while they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from enginehouse.contract.errors import RequestCancelled
from enginehouse.contract.surface import Chunk, ErrorAnswer, Piece
from enginehouse.contract.usage import Usage
from enginehouse_responses.log import EventLog, EventLogs
from enginehouse_responses.store import ResponseStore
from enginehouse_responses.writer import ResponseWriter

__all__ = ["KeptResponses", "KeptWriter"]


class KeptWriter:
    """Writes one response; an assembler of :mod:`enginehouse.contract.surface`.

    Args:
        kept: is told the beginning, before the client gets the id, and the end.

    Attributes:
        namespace: of the key that made the response.
        items: that were sent for it.
    """

    def __init__(
        self,
        kept: KeptResponses,
        writer: ResponseWriter,
        *,
        namespace: str,
        items: Sequence[Chunk],
    ) -> None:
        self.namespace = namespace
        self.items = items
        self._kept = kept
        self._log: EventLog | None = None  # of a response that is shown while it is made
        self._writer = writer
        self._end = asyncio.Event()

    @property
    def id(self) -> str:
        """The id of the response."""
        return self._writer.resource.id

    def to_plain(self) -> Chunk:
        """Return the response as it is now."""
        return self._writer.to_plain()

    def cancel(self) -> None:
        """Mark the response as cancelled; unless its generation is cancelled, it ends at its next piece."""
        self._writer.is_cancelled = True

    async def wait(self) -> None:
        """Return when the response has ended."""
        await self._end.wait()

    # -- what core calls ---------------------------------------------------------------------------

    def early(self) -> Chunk:
        """Return the response of a request in the background."""
        self._begin()
        return self.to_plain()

    def opening(self) -> Sequence[Any]:
        """Return the first events."""
        self._begin()
        return self._add(self._writer.opening())

    def push(self, piece: Piece) -> Sequence[Any]:
        """Return the events of a piece."""
        if self._writer.is_cancelled:
            raise RequestCancelled("The request was cancelled by its client.")
        return self._add(self._writer.push(piece))

    def close(self, usage: Usage, details: dict[str, Any] | None) -> Sequence[Any]:
        """Return the last events."""
        return self._finish(self._writer.close(usage, details))

    def fail(self, error: ErrorAnswer) -> Sequence[Any]:
        """Return the events of a response that breaks off."""
        return self._finish(self._writer.fail(error))

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the response that is not streamed."""
        self._finish(self._writer.close(usage, details))
        return self.to_plain()

    def _begin(self) -> None:
        if self._log is None:
            self._log = self._kept.begin(self)

    def _add(self, events: Sequence[Chunk | bytes]) -> Sequence[Any]:
        return events if self._log is None else self._log.add(events)

    def _finish(self, events: Sequence[Chunk]) -> Sequence[Any]:
        written = self._add(events)
        self._kept.end(self)
        self._end.set()
        return written


class KeptResponses:
    """All kept responses, in progress and complete.

    Args:
        max_events_bytes: memory for the events of streams.
    """

    def __init__(self, store: ResponseStore, max_events_bytes: int) -> None:
        self.store = store
        self.logs = EventLogs(max_events_bytes)
        self._live: dict[str, KeptWriter] = {}

    def live(self, namespace: str, response_id: str) -> KeptWriter | None:
        """Return a response in progress; None if the namespace has none with this id."""
        found = self._live.get(response_id)
        return found if found is not None and found.namespace == namespace else None

    def begin(self, writer: KeptWriter) -> EventLog:
        """Store and show a response from now on; returns its log."""
        self._live[writer.id] = writer
        self._save(writer)
        return self.logs.open(writer.id)

    def end(self, writer: KeptWriter) -> None:
        """Store the final state."""
        self._save(writer)
        self._live.pop(writer.id, None)
        self.logs.close(writer.id)

    def _save(self, writer: KeptWriter) -> None:
        self.store.put(writer.namespace, writer.to_plain(), writer.items)
