"""Waiting for a condition that sets no event: of another thread or process, or of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until", "wait_until"]

_T = TypeVar("_T")
_TIMEOUT_S = 60.0
_POLL_S = 0.005


def wait_until(condition: Callable[[], _T], what: object = "the condition", timeout_s: float = _TIMEOUT_S) -> _T:
    """Call ``condition`` until it returns a true value, and return that value.

    Args:
        what: names the condition in the error; a function is called for the text when the time is over.

    Raises:
        TimeoutError: the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s in vain for {what() if callable(what) else what}")
        time.sleep(_POLL_S)
    return found


async def until(condition: Callable[[], _T], timeout_s: float = _TIMEOUT_S) -> _T:
    """:func:`wait_until` for coroutines of the event loop."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110 - such conditions set no event
            await asyncio.sleep(_POLL_S)
    return found
