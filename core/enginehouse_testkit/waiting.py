"""Waiting for a condition that sets no event: of another thread or process, or of a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until", "wait_until"]

_T = TypeVar("_T")
_TIMEOUT_S = 100.0
_POLL_S = 0.005
_MAX_POLL_S = 0.1
_MIN_REST = 3
"""Pauses in relation to the time of an expensive condition: waiting must not slow down what is waited for."""


def wait_until(condition: Callable[[], _T], what: object = "the condition", timeout_s: float = _TIMEOUT_S) -> _T:
    """Call ``condition`` until it returns a true value, and return that value.

    Args:
        what: names the condition in the error; a function is called for the text when the time is over.

    Raises:
        TimeoutError: the time is over.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    while not (found := condition()):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"waited {timeout_s} s in vain for {what() if callable(what) else what}")
        time.sleep(min(max(_POLL_S, _MIN_REST * (now - began)), _MAX_POLL_S))
        began = time.monotonic()
    return found


async def until(condition: Callable[[], _T], timeout_s: float = _TIMEOUT_S) -> _T:
    """:func:`wait_until` for coroutines of the event loop."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110 - such conditions set no event
            await asyncio.sleep(_POLL_S)
    return found
