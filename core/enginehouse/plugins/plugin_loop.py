"""An event loop for the coroutines of one plugin object, in a thread of its own, and the way back to core's.

A coroutine that blocks holds the loop of its plugin and no other: core's watches it, and if it does not react within
the time limit, its calls fail and the next ones get a new loop. What a coroutine awaits is not limited here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from attrs import define, field

from enginehouse.contract.errors import PluginFailed
from enginehouse.plugins.threads import Abandoned, NamesPlugin, stack_of, stop_thread

__all__ = ["CoreLoop", "OnCoreLoop", "PluginLoop"]

_T = TypeVar("_T")


@define(eq=False)
class _Running:
    """A loop and its thread.

    Attributes:
        failure: set if the loop does not react.
    """

    loop: asyncio.AbstractEventLoop
    failure: asyncio.Future[PluginFailed]
    thread: threading.Thread | None = None
    num_calls: int = 0
    watch: asyncio.Task[None] | None = None


@define(eq=False)
class PluginLoop:
    """The event loop of one object of a plugin; started when it is needed. Used on core's event loop.

    Attributes:
        guard: names the plugin.
        max_abandoned: maximum number of loops that were given up and are still held.
    """

    guard: NamesPlugin
    max_abandoned: int = 8
    _running: _Running | None = field(default=None, init=False)
    _abandoned: list[_Running] = field(factory=list, init=False)

    async def run(self, place: str, start: Callable[[], Awaitable[_T]], timeout_s: float) -> _T:
        """Return ``await start()``, a guarded call, run on this loop. A cancellation is passed on, not waited for.

        Args:
            place: name of the method, for messages.
            start: creates the awaitable; called on this loop.
            timeout_s: maximum time for which the loop may be held.

        Raises:
            PluginFailed: the loop was held longer, by this call or another one, or too many loops are.
        """

        async def run_there() -> _T:
            return await start()

        running = self._current(place)
        running.num_calls += 1
        if running.watch is None:
            running.watch = asyncio.create_task(self._watch(running, place, timeout_s))
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_there(), running.loop))
        try:
            await asyncio.wait((call, running.failure), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise running.failure.result()
        finally:
            call.cancel()
            running.num_calls -= 1

    def _current(self, place: str) -> _Running:
        """Return the loop in use, or a new one."""
        core = asyncio.get_running_loop()
        former = self._running
        if former is not None and former.failure.get_loop() is not core:  # core has a new loop, as in tests
            former.loop.call_soon_threadsafe(former.loop.stop)
            former = None
        if former is None or former.thread is None or not former.thread.is_alive():
            self._abandoned = [one for one in self._abandoned if one.thread is not None and one.thread.is_alive()]
            if len(self._abandoned) >= self.max_abandoned:
                what = f"is busy: {len(self._abandoned)} of its event loops are held by calls that do not return"
                raise self.guard.mistake(place, what)
            self._running = running = _Running(asyncio.new_event_loop(), core.create_future())
            name = f"loop of {self.guard.kind} {self.guard.name}"
            running.thread = threading.Thread(target=_serve, args=(running.loop,), name=name, daemon=True)
            running.thread.start()
            return running
        return former

    async def _watch(self, running: _Running, place: str, timeout_s: float) -> None:
        """Give the loop up if it does not react, until it has no calls."""
        while running.num_calls:
            reacted = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), running.loop)
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(reacted)
            except TimeoutError:
                self._give_up(running, place, timeout_s)
                return
            await asyncio.sleep(timeout_s / 8)
        running.watch = None

    def _give_up(self, running: _Running, place: str, timeout_s: float) -> None:
        assert running.thread is not None and running.thread.ident is not None
        where = stack_of(running.thread.ident)
        what = f"or another call of it held the event loop of the plugin for {timeout_s:g} s"
        running.failure.set_result(self.guard.mistake(place, what, more=where))
        self._running = None
        self._abandoned.append(running)
        running.loop.call_soon_threadsafe(running.loop.stop)
        stop_thread(running.thread.ident)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; the work of a thread."""
    asyncio.set_event_loop(loop)
    with contextlib.suppress(Abandoned):
        loop.run_forever()
        loop.close()


class CoreLoop:
    """Runs what a plugin asks of core on core's event loop, from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def run(self, start: Callable[[], Awaitable[_T]]) -> _T:
        """Return ``await start()``, which runs there."""

        async def run_there() -> _T:
            return await start()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_there(), self._loop))

    def call(self, work: Callable[[], _T]) -> _T:
        """Return ``work()``, called there; waits for it."""

        async def call_there() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(call_there(), self._loop).result()


class OnCoreLoop:
    """An object of core whose methods run on core's event loop, wherever they are called."""

    def __init__(self, target: Any, core: CoreLoop) -> None:
        self._target = target
        self._core = core

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._target, name)
        core: CoreLoop = self._core
        if inspect.iscoroutinefunction(member):
            return lambda *arguments, **named: core.run(lambda: member(*arguments, **named))
        if inspect.ismethod(member):
            return lambda *arguments, **named: core.call(lambda: member(*arguments, **named))
        return member
