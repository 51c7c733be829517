"""Work whose time grows with what clients send: where that is much it is done on another thread, beside the event loop.

Everything that is made of a request's body before it is submitted, and of its answer when it is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["aside"]

_T = TypeVar("_T")


async def aside(is_much: bool, work: Callable[[], _T]) -> _T:
    """What ``work`` gives; with ``is_much`` running requests go on meanwhile, at the price of a thread's start."""
    return await asyncio.to_thread(work) if is_much else work()
