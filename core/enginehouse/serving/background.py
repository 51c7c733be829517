"""Runs blocking work off the event loop, so that running requests continue.

``run_in_thread`` uses the event loop's thread pool, for work whose time grows with the size of client data: everything
done with a request body before submission, and with a complete answer. ``run_in_daemon_thread`` uses a separate thread,
for work that may hang; ``run_with_plugins`` does so for calls of plugins that are not our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from enginehouse.plugins.threads import caller_has_left, outcome_of

_T = TypeVar("_T")


async def run_in_thread(is_much: bool, work: Callable[[], _T]) -> _T:
    """Return ``work()``; with ``is_much`` in a thread, at the cost of its start, so that running requests continue."""
    return await asyncio.to_thread(work) if is_much else work()


async def run_in_daemon_thread(name: str, work: Callable[[], _T]) -> _T:
    """Return ``work()``, run in a thread with that name, which the server does not wait for when it exits.

    Cancellation does not stop the thread; its result is then dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(outcome: Callable[[Any], None]) -> None:
        if not done.done():
            outcome(done)

    def run() -> None:
        outcome = outcome_of(work)
        with contextlib.suppress(RuntimeError):  # the server has meanwhile ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


async def run_with_plugins(are_foreign: bool, work: Callable[[], _T]) -> _T:
    """Return ``work()``, which calls plugins; with ``are_foreign`` in a thread, where it waits for theirs.

    Each of its calls has a time limit and an error of its own (:mod:`enginehouse.plugins.threads`). After a
    cancellation it makes no further ones.
    """
    if not are_foreign:
        return work()
    has_left = threading.Event()
    context = contextvars.copy_context()
    context.run(caller_has_left.set, has_left.is_set)
    try:
        return await run_in_daemon_thread("calls of plugins", lambda: context.run(work))
    except asyncio.CancelledError:
        has_left.set()
        raise
