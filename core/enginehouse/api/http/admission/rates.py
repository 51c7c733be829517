"""Rates per minute, counted in this process by the library ``limits``; no other module uses it.

The library's sliding window counter stores two numbers per rate, independent of the amounts, and can return units,
which its exact window cannot: tokens are reserved when a request arrives and settled when it ends. The previous minute
counts with the fraction of it that is within the last sixty seconds.
"""

from __future__ import annotations

import math
import time

from attrs import frozen
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

__all__ = ["Rate", "RateState", "Rates", "Taken"]

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
