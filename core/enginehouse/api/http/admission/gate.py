"""Admits a caller's generation requests within its limits and those of the whole server.

A :class:`Ticket` is one request. Its tokens are estimated and reserved once the request is known, and settled when it
ends. Refusals state when to retry: from the rate's window, or for the concurrency limit from the recent rate at which
such requests ended.

Rates are counted in this process by the library ``limits``, which no other module uses. Its sliding window counter
stores two numbers per rate, independent of the amounts, and can return units, which its exact window cannot. The
previous minute counts with the fraction of it that is within the last sixty seconds. Litestar's ``RateLimitMiddleware``
counts requests only: tokens are known after the response, and concurrency is not a rate.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from enginehouse.api.http.admission.memory import MemoryAccount
from enginehouse.contract.errors import RateLimited, ServerOverloaded
from enginehouse.contract.identity import Identity
from enginehouse.settings.config import LimitsSettings
from enginehouse.workers.request_queue import Throughput

_WINDOW_S = 60
_MARGIN_S = 0.001
"""Added to waits, so that the unit has expired when they end."""


@frozen(kw_only=True)
class Rate:
    """Maximum amount per minute.

    Attributes:
        owner: the owner; rates of different owners are counted separately.
        unit: ``requests`` or ``tokens``.
    """

    owner: str
    unit: str
    per_minute: int

    @property
    def item(self) -> RateLimitItemPerMinute:
        """The rate as an object of the library."""
        return RateLimitItemPerMinute(self.per_minute, namespace=self.unit)

    @property
    def key(self) -> str:
        """The library's storage key of the rate."""
        return self.item.key_for(self.owner)


@frozen(kw_only=True)
class RateState:
    """Current state of a rate. ``reset_s`` is the number of seconds until it is unused, if nothing more is taken."""

    rate: Rate
    remaining: int
    reset_s: float


@frozen(kw_only=True)
class Taken:
    """Units that were taken; ``window`` is the library's storage key for them."""

    rate: Rate
    amount: int
    window: str


class Rates:
    """All rates of a server; used on one event loop. Amounts above a full minute's worth are capped to it."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def wait_s(self, rate: Rate, amount: int) -> float:
        """Return the seconds until ``amount`` may be taken; 0 means now."""
        amount = min(amount, rate.per_minute)
        if await self._limiter.test(rate.item, rate.owner, cost=amount):
            return 0.0
        before, before_left_s, current, current_left_s = await self._storage.get_sliding_window(rate.key, _WINDOW_S)
        # The library compares whole units: usage may exceed ``per_minute - amount`` by less than one.
        free = rate.per_minute - amount + 1
        if before and current < free:  # enough of the previous minute expires during this one
            return max(0.0, before_left_s - (free - current) * _WINDOW_S / before) + _MARGIN_S
        return current_left_s - min(_WINDOW_S, free * _WINDOW_S / current) + _MARGIN_S

    async def take(self, rate: Rate, amount: int) -> Taken:
        """Take units that :meth:`wait_s` has reported as available."""
        amount = min(amount, rate.per_minute)
        window = self._window(rate)
        await self._limiter.hit(rate.item, rate.owner, cost=amount)
        return Taken(rate=rate, amount=amount, window=window)

    async def settle(self, taken: Taken, amount: int) -> None:
        """Return taken units that were not used, or count usage beyond them."""
        more = amount - taken.amount
        if more > 0:
            await self._storage.incr(self._window(taken.rate), 2 * _WINDOW_S, amount=more)
        elif more < 0 and await self._storage.get(taken.window):
            await self._storage.decr(taken.window, -more)

    async def state(self, rate: Rate) -> RateState:
        """Return the current state."""
        before, before_left_s, current, current_left_s = await self._storage.get_sliding_window(rate.key, _WINDOW_S)
        used = before * before_left_s / _WINDOW_S + current
        reset_s = current_left_s if current else before_left_s
        return RateState(rate=rate, remaining=max(0, math.floor(rate.per_minute - used)), reset_s=reset_s)

    def _window(self, rate: Rate) -> str:
        """Return the library's storage key for units taken now."""
        return self._storage.sliding_window_keys(rate.key, _WINDOW_S, time.time())[1]


_MAX_OWNERS = 4096

_EVERYBODY = ""
"""Owner of the limits of the whole server; no key has this name."""


@frozen(kw_only=True)
class _Limits:
    """Limits of one owner, a key or the whole server; None means no limit."""

    owner: str
    requests: Rate | None
    tokens: Rate | None
    max_concurrent: int | None


@define(eq=False)
class _Running:
    """Running requests of one owner, and the rate at which they end."""

    ended: Throughput
    count: int = 0


@define(eq=False)
class Ticket:
    """One request that is admitted or waiting for admission.

    Attributes:
        used: tokens of its prompt and completion; None counts the reserved tokens.
        states: remaining amounts of its rates; per unit, the lowest. Also set for a refused request.
        owners: owners whose limits apply to it; managed by ``Admission``, like ``taken``.
        is_in: True while it counts as a running request.
        is_generating: True if its end is used to estimate when the next one may start; other requests take negligible
            time.
    """

    used: int | None = None
    states: tuple[RateState, ...] = ()
    owners: tuple[_Limits, ...] = ()
    is_in: bool = False
    is_generating: bool = True
    taken: list[Taken] = field(factory=list)


class Admission:
    """Owns the counters of all callers. Used on one event loop.

    Args:
        clock: seconds, monotonic.

    Attributes:
        memory: the account of memory held on behalf of clients.
    """

    def __init__(self, settings: LimitsSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory = MemoryAccount(settings)
        self._settings = settings
        self._clock = clock
        self._rates = Rates()
        self._running: dict[str, _Running] = {}
        self._lock = asyncio.Lock()  # makes check and take atomic

    def change(self, settings: LimitsSettings) -> None:
        """Apply new limits; admitted requests keep what they hold."""
        self._settings = settings
        self.memory.change(settings)

    @property
    def num_owners(self) -> int:
        """Number of callers whose requests are counted."""
        return len(self._running)

    def ticket(self, caller: Identity | None, *, is_generating: bool = True) -> Ticket:
        """Return a ticket for one request, not yet admitted. The caller must always close it.

        Args:
            is_generating: if False, only the concurrency limit applies.
        """
        owners = self._owners(caller)
        if not is_generating:
            owners = tuple(evolve(owner, requests=None, tokens=None) for owner in owners)
        return Ticket(owners=owners, is_generating=is_generating)

    async def enter(self, ticket: Ticket) -> None:
        """Admit the request.

        Raises:
            RateLimited: the caller has too many running requests, or sent too many in the last minute.
            ServerOverloaded: all callers together have too many running requests.
        """
        try:
            for owner in ticket.owners:
                self._check_concurrent(owner)
            await self._take([(owner.requests, 1) for owner in ticket.owners if owner.requests is not None])
            for owner in ticket.owners:
                self._count(owner.owner, 1)
            ticket.is_in = True
        finally:
            await self._note_states(ticket)

    async def reserve(self, ticket: Ticket, num_tokens: int) -> None:
        """Reserve tokens for the prompt and the completion.

        Raises:
            RateLimited: not enough tokens are left in this minute.
        """
        wanted = [(owner.tokens, num_tokens) for owner in ticket.owners if owner.tokens is not None]
        if wanted:
            try:
                ticket.taken += await self._take(wanted)
            finally:
                await self._note_states(ticket)

    async def close(self, ticket: Ticket) -> None:
        """End the request and settle its tokens; no effect if it was never admitted or is already closed."""
        if ticket.is_in:
            ticket.is_in = False
            for owner in ticket.owners:
                self._count(owner.owner, -1, tells_pace=ticket.is_generating)
        if ticket.used is not None:
            for taken in ticket.taken:
                await self._rates.settle(taken, ticket.used)
        ticket.taken.clear()

    def _owners(self, caller: Identity | None) -> tuple[_Limits, ...]:
        """Return the limits that apply to a caller's request: its own, and those of the whole server."""
        limits = self._settings
        everybody = _limits(_EVERYBODY, limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
        if caller is None:
            return (everybody,)
        own = _limits(
            caller.name,
            caller.requests_per_minute or limits.key_requests_per_minute,
            caller.tokens_per_minute or limits.key_tokens_per_minute,
            caller.max_concurrent or limits.key_max_concurrent,
        )
        return (own, everybody)

    def _check_concurrent(self, owner: _Limits) -> None:
        running = self._running.get(owner.owner)
        if owner.max_concurrent is None or running is None or running.count < owner.max_concurrent:
            return
        per_s = running.ended.per_s
        retry_after_s = 1 / per_s if per_s else 1.0
        if owner.owner == _EVERYBODY:
            message = f"The server has {running.count} requests to answer, as many as it takes; try again in a moment."
            raise ServerOverloaded(message, retry_after_s)
        message = f"This key has {running.count} requests running, as many as it may; try again when one has ended."
        raise RateLimited(message, "concurrent", retry_after_s)

    def _count(self, owner: str, more: int, *, tells_pace: bool = False) -> None:
        running = self._running.get(owner)
        if running is None:
            self._forget_idle()
            running = self._running[owner] = _Running(Throughput(self._clock))
        if tells_pace:
            running.ended.count()
        running.count += more
        running.ended.run(running.count > 0)

    def _forget_idle(self) -> None:
        """Bound the number of counters: caller names may come from tokens issued elsewhere."""
        if len(self._running) >= _MAX_OWNERS:
            self._running = {name: running for name, running in self._running.items() if running.count}

    async def _take(self, wanted: Sequence[tuple[Rate, int]]) -> list[Taken]:
        """Take all amounts or none; the rate with the longest wait determines the refusal."""
        async with self._lock:
            waits_s = [await self._rates.wait_s(rate, amount) for rate, amount in wanted]
            longest_s = max(waits_s, default=0.0)
            if longest_s > 0:
                raise _refusal(*wanted[waits_s.index(longest_s)], longest_s)
            return [await self._rates.take(rate, amount) for rate, amount in wanted]

    async def _note_states(self, ticket: Ticket) -> None:
        states: dict[str, RateState] = {}
        for owner in ticket.owners:
            for rate in (owner.requests, owner.tokens):
                if rate is None:
                    continue
                state = await self._rates.state(rate)
                other = states.get(rate.unit)
                if other is None or state.remaining < other.remaining:
                    states[rate.unit] = state
        ticket.states = tuple(states.values())


def _limits(owner: str, requests: int | None, tokens: int | None, max_concurrent: int | None) -> _Limits:
    def rate(unit: str, per_minute: int | None) -> Rate | None:
        return None if per_minute is None else Rate(owner=owner, unit=unit, per_minute=per_minute)

    return _Limits(
        owner=owner, requests=rate("requests", requests), tokens=rate("tokens", tokens), max_concurrent=max_concurrent
    )


def _refusal(rate: Rate, amount: int, wait_s: float) -> RateLimited:
    asked = f", and this request asks for about {amount}" if rate.unit == "tokens" else ""
    whose = "All callers together" if rate.owner == _EVERYBODY else "This key"
    message = f"{whose} may use {rate.per_minute} {rate.unit} per minute{asked}; try again in {math.ceil(wait_s)} s."
    return RateLimited(message, rate.unit, wait_s)
