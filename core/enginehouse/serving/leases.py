"""Uses of a model: one lease per request, from the time it gets the model until its answer has ended.

A model with leases is busy. Does not know loading and memory; ``served`` decides when leases are given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from enginehouse.contract.errors import EngineError, EnginehouseError

_M = TypeVar("_M")


class Holder(Protocol):
    """A generation, from the point of view of its lease."""

    def fail(self, error: EnginehouseError) -> None:
        """End with ``error``."""


class Lease(Generic[_M]):
    """One use of ``model``. It ends with ``release`` or with the end of a generation, in any order."""

    def __init__(self, model: _M, uses: Uses[_M]) -> None:
        self.model = model
        self._uses = uses
        self._generation: Holder | None = None
        self._error: EnginehouseError | None = None  # the reason if it was ended

    def tie(self, generation: Holder) -> None:
        """Fail the generation if the model is taken away, or has been."""
        self._generation = generation
        if self._error is not None:
            generation.fail(self._error)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Within the block, raise the reason for taking the model away instead of the resulting engine error."""
        try:
            yield
        except EngineError as error:
            if self._error is None:
                raise
            raise self._error from error

    def release(self) -> None:
        """End the use of the model; idempotent."""
        self._generation = None  # the generation refers to this lease; break the cycle without the garbage collector
        self._uses.remove(self)

    def end(self, error: EnginehouseError) -> None:
        """Take the model away: its generation ends with ``error``; a request in preparation finds a closed engine."""
        self._error = error
        if self._generation is not None:
            self._generation.fail(error)
        self.release()


@define(eq=False)
class Uses(Generic[_M]):
    """Open leases of one model.

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
        """End a lease; no effect if it has ended."""
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
        return sum(not waiter.done() for waiter in self._waiting)  # waiters that were moved here may have left since

    async def wait(self, timeout_s: float | None) -> Lease[_M] | None:
        """Wait for a lease; None after ``timeout_s``, if given. Raises the error with which the waiters are refused."""
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
            waiter.cancel()  # in whichever object it is now; no effect if it is done
        return None if waiter.cancelled() else waiter.result()

    def move_to(self, other: Waiters[_M]) -> None:
        """Move all waiters to another object."""
        other._waiting.update(self._waiting)
        self._waiting = {}

    def answer(self, uses: Uses[_M], model: _M) -> None:
        """Give all waiters a lease of ``model`` now."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(uses.add(model))

    def refuse(self, error: EnginehouseError) -> None:
        """Fail all waiters with ``error``."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)
