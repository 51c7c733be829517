"""Who uses a model now: a lease per request, from the moment it gets the model until its answer has ended.

A model with leases is busy. Knows nothing of loading and memory; ``served`` decides when leases are given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from attrs import define, field

from enginehouse.contract.backend import Generation
from enginehouse.contract.errors import EngineError, EnginehouseError
from enginehouse.contract.types import Event

__all__ = ["Lease", "LeasedGeneration", "Uses", "Waiters"]

_M = TypeVar("_M")


class LeasedGeneration:
    """A generation whose end is the end of a lease. Implements :class:`enginehouse.contract.backend.Generation`."""

    def __init__(self, generation: Generation, on_end: Callable[[], None]) -> None:
        self.num_prompt_tokens = generation.num_prompt_tokens
        self._generation = generation
        self._on_end = on_end
        self._error: EnginehouseError | None = None

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """The batches of events."""
        try:
            async for batch in self._generation:
                yield batch
            if self._error is not None:
                raise self._error
        finally:
            self.cancel()

    @property
    def has_started(self) -> bool:
        """Whether it has left the queue; engines that do not say so begin at once."""
        return getattr(self._generation, "has_started", True)

    @property
    def num_replays(self) -> int:
        """How often the request went on in another worker."""
        return getattr(self._generation, "num_replays", 0)

    @property
    def num_waiting_events(self) -> int:
        """Events that have come and are not read yet; engines that do not say so make none before they are read."""
        return getattr(self._generation, "num_waiting_events", 0)

    def cancel(self) -> None:
        """Stop generating; idempotent."""
        self._generation.cancel()
        self._on_end()

    def fail(self, error: EnginehouseError) -> None:
        """Stop generating; whoever iterates gets ``error``."""
        self._error = error
        self.cancel()


class Lease(Generic[_M]):
    """One use of ``model``. Release it, or let it end with a generation; both may happen, in any order."""

    def __init__(self, model: _M, uses: Uses[_M]) -> None:
        self.model = model
        self._uses = uses
        self._generation: LeasedGeneration | None = None
        self._error: EnginehouseError | None = None  # why it was ended

    def hold(self, generation: Generation) -> LeasedGeneration:
        """The same generation; the lease ends when it does."""
        held = self._generation = LeasedGeneration(generation, self.release)
        if self._error is not None:
            held.fail(self._error)
        return held

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """While the block runs, an engine that is gone because the model was taken away is not told of as dead."""
        try:
            yield
        except EngineError as error:
            if self._error is None:
                raise
            raise self._error from error

    def release(self) -> None:
        """The model is not needed any more; idempotent."""
        self._generation = None  # it knows this lease, and neither should wait for the garbage collector
        self._uses.remove(self)

    def end(self, error: EnginehouseError) -> None:
        """Take the model away: its generation ends with ``error``; one that is still prepared meets a closed engine."""
        self._error = error
        if self._generation is not None:
            self._generation.fail(error)
        self.release()


@define(eq=False)
class Uses(Generic[_M]):
    """The open leases of one model.

    Attributes:
        on_change: called when the first lease begins and when the last one has ended.
        last_used: ``time.monotonic()`` of the last begin or end of a lease.
    """

    on_change: Callable[[], None] = lambda: None
    last_used: float = field(factory=time.monotonic)
    _open: set[Lease[_M]] = field(factory=set)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, model: _M) -> Lease[_M]:
        """Begin a lease."""
        lease = Lease(model, self)
        self._open.add(lease)
        self.last_used = time.monotonic()
        if len(self._open) == 1:
            self.on_change()
        return lease

    def remove(self, lease: Lease[_M]) -> None:
        """End a lease; harmless when it has ended."""
        if lease in self._open:
            self._open.discard(lease)
            self.last_used = time.monotonic()
            if not self._open:
                self.on_change()

    def end_all(self, error: EnginehouseError) -> None:
        """End every lease with ``error``."""
        for lease in tuple(self._open):
            lease.end(error)


@define(eq=False)
class Waiters(Generic[_M]):
    """Requests that wait for a model to be loaded, in order of arrival."""

    _waiting: dict[asyncio.Future[Lease[_M]], None] = field(factory=dict)

    def __len__(self) -> int:
        return sum(not waiter.done() for waiter in self._waiting)  # who was moved here may have left since

    async def wait(self, timeout_s: float | None) -> Lease[_M] | None:
        """A lease, once there is one; None after ``timeout_s``, if given. Raises what the waiters are refused with."""
        waiter: asyncio.Future[Lease[_M]] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()
            raise
        finally:
            self._waiting.pop(waiter, None)
            waiter.cancel()  # wherever it may have been moved to; harmless when it is done
        return None if waiter.cancelled() else waiter.result()

    def move_to(self, other: Waiters[_M]) -> None:
        """Let all who wait here wait there."""
        other._waiting.update(self._waiting)
        self._waiting = {}

    def answer(self, uses: Uses[_M], model: _M) -> None:
        """Give all who wait a lease of ``model`` now."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(uses.add(model))

    def refuse(self, error: EnginehouseError) -> None:
        """Raise ``error`` where they wait."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)
