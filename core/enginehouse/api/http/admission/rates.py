"""Units per minute, counted by the library ``limits`` in this process: the one module that knows it.

The library's sliding window counter holds two numbers per rate, whatever the amounts, and takes units back, which its
exact window cannot: tokens are set aside when a request comes and settled when it ends. The minute before the running
one counts with the share of it that the last sixty seconds still cover.
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
"""Behind the very moment at which a unit fades."""


@frozen(kw_only=True)
class Rate:
    """What may be used per minute.

    Attributes:
        owner: whose it is; rates of different owners are counted apart.
        unit: ``requests`` or ``tokens``.
    """

    owner: str
    unit: str
    per_minute: int

    @property
    def item(self) -> RateLimitItemPerMinute:
        """The rate as the library knows it."""
        return RateLimitItemPerMinute(self.per_minute, namespace=self.unit)

    @property
    def key(self) -> str:
        """Where the library counts it."""
        return self.item.key_for(self.owner)


@frozen(kw_only=True)
class RateState:
    """A rate now. ``reset_s`` is after how many seconds nothing of it is used, if nothing more is taken."""

    rate: Rate
    remaining: int
    reset_s: float


@frozen(kw_only=True)
class Taken:
    """Units that were taken; ``window`` is where the library counts them."""

    rate: Rate
    amount: int
    window: str


class Rates:
    """All rates of a server; used on one event loop. More than a whole minute's worth is taken as just that."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def wait_s(self, rate: Rate, amount: int) -> float:
        """After how many seconds so much may be taken; 0 is now."""
        amount = min(amount, rate.per_minute)
        if await self._limiter.test(rate.item, rate.owner, cost=amount):
            return 0.0
        before, before_left_s, current, current_left_s = await self._storage.get_sliding_window(rate.key, _WINDOW_S)
        # The library compares whole units: what is used may be all but one more than what is left besides this amount.
        free = rate.per_minute - amount + 1
        if before and current < free:  # enough of the minute before fades while this one runs
            return max(0.0, before_left_s - (free - current) * _WINDOW_S / before) + _MARGIN_S
        return current_left_s - min(_WINDOW_S, free * _WINDOW_S / current) + _MARGIN_S

    async def take(self, rate: Rate, amount: int) -> Taken:
        """Take units that :meth:`wait_s` says are there."""
        amount = min(amount, rate.per_minute)
        window = self._window(rate)
        await self._limiter.hit(rate.item, rate.owner, cost=amount)
        return Taken(rate=rate, amount=amount, window=window)

    async def settle(self, taken: Taken, amount: int) -> None:
        """Give back what was not used of what was taken, or count what was used beyond it."""
        more = amount - taken.amount
        if more > 0:
            await self._storage.incr(self._window(taken.rate), 2 * _WINDOW_S, amount=more)
        elif more < 0 and await self._storage.get(taken.window):
            await self._storage.decr(taken.window, -more)

    async def state(self, rate: Rate) -> RateState:
        """What is left."""
        before, before_left_s, current, current_left_s = await self._storage.get_sliding_window(rate.key, _WINDOW_S)
        used = before * before_left_s / _WINDOW_S + current
        reset_s = current_left_s if current else before_left_s
        return RateState(rate=rate, remaining=max(0, math.floor(rate.per_minute - used)), reset_s=reset_s)

    def _window(self, rate: Rate) -> str:
        """Where the library counts what is taken now."""
        return self._storage.sliding_window_keys(rate.key, _WINDOW_S, time.time())[1]
