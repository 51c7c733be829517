"""The generation that pipeline and API hold: the answer to one request, from its acceptance to its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import msgspec

from enginehouse.contract.engine import EngineStream, Placement, placement_of
from enginehouse.contract.errors import EnginehouseError, WorkerDied
from enginehouse.contract.types import Event, TextDelta
from enginehouse.plugins import Guard
from enginehouse.recovery.request import RecoverableRequest
from enginehouse.serving import LoadedModel
from enginehouse.serving.leases import Lease


class OutcomeObserver(Protocol):
    """Receives the outcome of a generation."""

    def answered(self) -> None:
        """The first batch has arrived."""

    def raised(self, error: EnginehouseError) -> None:
        """An error occurred before the first batch."""

    def ended(self) -> None:
        """The generation has ended. Called last, after any other outcome."""


class Generation:
    """The answer to one request that was accepted. It may be iterated once, or cancelled.

    Args:
        attempt: the events of the engine that has accepted the request.
        request: continues the request in the next worker; None if the answer ends with the engine.
        guard: the guard of an engine that a plugin has opened; None for those in workers.

    Attributes:
        ahead: batches that were read ahead of the reader.
        hides_logprobs: True if log-probabilities are removed from the batches that the reader gets.
        outcome_observer: receives the outcome.
    """

    def __init__(
        self, attempt: EngineStream, request: RecoverableRequest | None = None, guard: Guard | None = None
    ) -> None:
        self._guard = guard
        self.ahead: deque[Sequence[Event]] = deque()
        self.hides_logprobs = False
        self.outcome_observer: OutcomeObserver | None = None
        self._attempt = attempt
        self._request = request
        self._reading: AsyncIterator[Sequence[Event]] | None = None  # once something is read ahead
        self._has_begun = False
        self._is_cancelled = False
        self._error: EnginehouseError | None = None
        self._lease: Lease[LoadedModel] | None = None

    # -- status ------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; some engines learn it only at the end."""
        return self._attempt.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt of a request with ``return_token_ids``; None for others, and if the engine does not know it."""
        return self._attempt.prompt_token_ids

    @property
    def placement(self) -> Placement | None:
        """The replica of its engine that answers; None for engines without several."""
        placed = self._request.placement if self._request is not None else None
        return placed or placement_of(self._attempt)

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet."""
        num_unread = self._request.num_waiting_events if self._request is not None else 0
        return self._attempt.num_waiting_events + num_unread

    @property
    def has_started(self) -> bool:
        """True if it has left the queue of its engine; always true without recovery."""
        return self._request is None or self._request.has_started

    @property
    def num_replays(self) -> int:
        """Number of times that it continued in another worker."""
        return self._request.num_replays if self._request is not None else 0

    # -- reading -----------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over batches of events, without gaps or repetition. Closing the iterator early cancels the request.

        Raises:
            EnginehouseError: the request has failed, or :meth:`fail` was called.
        """
        if self.ahead or self._reading is not None or self.hides_logprobs:
            return self._after_reading_ahead()
        return self._read()

    async def read_ahead(self) -> Sequence[Event] | None:
        """Read one more batch, which stays available to the reader; None at the end. Raises like iteration."""
        if self._reading is None:
            self._reading = self._read()
        batch = await anext(self._reading, None)
        if batch is not None:
            self.ahead.append(batch)
        return batch

    async def _after_reading_ahead(self) -> AsyncIterator[Sequence[Event]]:
        try:
            while self.ahead or await self.read_ahead():
                batch = self.ahead.popleft()
                yield _without_logprobs(batch) if self.hides_logprobs else batch
        finally:
            self.cancel()

    async def _read(self) -> AsyncIterator[Sequence[Event]]:
        """Yield the batches of all attempts."""
        try:
            attempt: EngineStream | None = self._attempt
            while attempt is not None and not self._is_cancelled:
                self._attempt = attempt
                try:
                    with self._guard.calling("its stream") if self._guard is not None else nullcontext():
                        async for batch in attempt:
                            if not self._has_begun:
                                self._begin()
                            yield batch
                except WorkerDied:
                    if self._request is None:
                        raise
                    await asyncio.sleep(0)  # the event loop may still have to deliver the news of the death
                attempt = await self._request.next_attempt() if self._request is not None else None
            if self._error is not None:
                raise self._error
        except EnginehouseError as error:
            if self.outcome_observer is not None and not self._has_begun:
                self.outcome_observer.raised(error)
            raise
        finally:
            self.cancel()

    def _begin(self) -> None:
        self._has_begun = True
        if self.outcome_observer is not None:
            self.outcome_observer.answered()

    # -- ending ------------------------------------------------------------------------------------

    def keep(self, lease: Lease[LoadedModel]) -> None:
        """Release the lease at the end; if the lease ends first, fail with its reason."""
        self._lease = lease
        lease.tie(self)

    def fail(self, error: EnginehouseError) -> None:
        """Stop generating; iteration raises ``error``."""
        self._error = error
        self.cancel()

    def cancel(self) -> None:
        """Stop generating; idempotent, also after the end. Iteration then ends without an error."""
        self._is_cancelled = True
        self._reading = None  # it refers to this generation; break the cycle without the garbage collector
        if self._request is not None:
            self._request.cancel()
        else:
            self._attempt.cancel()
        if self._lease is not None:
            self._lease.release()
        if self.outcome_observer is not None:
            self.outcome_observer.ended()


def _without_logprobs(batch: Sequence[Event]) -> Sequence[Event]:
    return [msgspec.structs.replace(event, logprobs=None) if isinstance(event, TextDelta) else event for event in batch]
