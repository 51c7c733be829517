"""Blocking work beside the event loop, where running requests go on meanwhile.

In the loop's pool where its time grows with what clients send: everything that is made of a request's body before it is
submitted, and of its answer when it is whole. On a thread of its own where it may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

__all__ = ["apart", "aside"]

_T = TypeVar("_T")


async def aside(is_much: bool, work: Callable[[], _T]) -> _T:
    """What ``work`` gives; with ``is_much`` running requests go on meanwhile, at the price of a thread's start."""
    return await asyncio.to_thread(work) if is_much else work()


async def apart(name: str, work: Callable[[], _T]) -> _T:
    """What ``work`` gives, on a thread of that name, for which no end of the server waits: the loop's pool would.

    Cancelling it does not stop the thread; what that gives then is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(done.set_result, work())
        except StopIteration as error:  # no future takes it: the task would wait for ever
            early = RuntimeError(f"{name}: StopIteration")
            early.__cause__ = error
            outcome = partial(done.set_exception, early)
        except BaseException as error:  # noqa: BLE001 - raised in the task that waits for this thread
            outcome = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
