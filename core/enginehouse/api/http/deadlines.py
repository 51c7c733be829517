"""Ends an exchange whose answer does not begin or end in time; what was sent by then stays with the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from enginehouse.api.http.exchange import Exchange
from enginehouse.contract.errors import EnginehouseError, FirstTokenTimeout, TotalTimeout
from enginehouse.settings.timeouts import Timeouts

__all__ = ["deadlines"]


@contextlib.contextmanager
def deadlines(exchange: Exchange, timeouts: Timeouts, began: float, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Watch the time while the block runs.

    Args:
        exchange: is ended when the time is up, which frees the slots of its requests.
        timeouts: how long what may take.
        began: ``time.perf_counter`` at the request's arrival.
        has_begun: whether there has been a sign of the answer; asked when there must be one.
    """
    loop = asyncio.get_running_loop()
    passed_s = time.perf_counter() - began

    def end(error: EnginehouseError, unless: Callable[[], bool]) -> None:
        if not unless():
            exchange.end(error)

    timers = [
        loop.call_later(max(0.0, seconds - passed_s), end, error, unless)
        for seconds, error, unless in (
            (timeouts.first_token_s, _first_token(timeouts.first_token_s), has_begun),
            (timeouts.total_s, _total(timeouts.total_s), lambda: False),
        )
        if seconds is not None
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _first_token(seconds: float | None) -> EnginehouseError:
    return FirstTokenTimeout(f"The answer did not begin within {seconds or 0:g} s (first_token_timeout_s).")


def _total(seconds: float | None) -> EnginehouseError:
    return TotalTimeout(f"The answer took longer than {seconds or 0:g} s (total_timeout_s).")
