"""Event loops for the coroutines of one plugin object, in threads of their own, and the way back to core's.

A call gets a loop without other calls while there are few, so a coroutine that blocks delays no other one. Core's loop
watches the loops in use: if one does not react within the time limit, its calls fail and it is replaced. What a
coroutine awaits is not limited here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

from attrs import define, field

from enginehouse.contract.errors import EnginehouseError
from enginehouse.plugins.threads import Abandoned, NamesPlugin, stack_of, stop_thread

_T = TypeVar("_T")

_SILENT_S = 0.05
"""Seconds without a reaction after which a loop gets no further calls."""


@define(eq=False)
class PluginLoop:
    """A loop and its thread.

    Attributes:
        failure: the error of all further calls: set if the loop did not react within the time limit, or by its owner.
        is_over: core has ended it.
        calls: places of the calls that have not returned.
        is_silent: it does not react at the moment.
    """

    loop: asyncio.AbstractEventLoop
    failure: asyncio.Future[EnginehouseError]
    thread: threading.Thread
    is_over: threading.Event
    calls: list[str] = field(factory=list)
    is_silent: bool = False
    watch: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Let the thread end, once the loop reacts; calls that have not returned are cancelled. Idempotent."""
        self.is_over.set()
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)


@define(eq=False)
class PluginLoops:
    """The event loops of one object of a plugin; started when they are needed. Used on core's event loop.

    Attributes:
        guard: names the plugin.
        max_loops: maximum number of loops, those included that were given up and are still held.
    """

    guard: NamesPlugin
    max_loops: int = 8
    _loops: list[PluginLoop] = field(factory=list, init=False)
    _abandoned: list[PluginLoop] = field(factory=list, init=False)

    async def run(
        self, place: str, start: Callable[[], Awaitable[_T]], timeout_s: float, on: PluginLoop | None = None
    ) -> _T:
        """Return ``await start()``, a guarded call, run on one of the loops. A cancellation is passed on at once.

        Args:
            place: name of the method, for messages.
            start: creates the awaitable; called on that loop.
            timeout_s: maximum time for which the loop may be held.
            on: a loop of :meth:`choose`.

        Raises:
            PluginFailed: the loop was held longer, by this call or another one, or too many loops are.
            EnginehouseError: the ``failure`` that its owner has set.
        """

        async def run_there() -> _T:
            return await start()

        chosen = on if on is not None else self.choose(place)
        if chosen.failure.done():
            raise chosen.failure.result()
        chosen.calls.append(place)
        if chosen.watch is None:
            chosen.watch = asyncio.create_task(self._watch(chosen, timeout_s))
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_there(), chosen.loop))
        try:
            await asyncio.wait((call, chosen.failure), return_when=asyncio.FIRST_COMPLETED)
            if call.cancelled() and not chosen.is_over.is_set():
                raise self.guard.mistake(place, "raised CancelledError, although nothing has cancelled it")
            if call.done():
                return call.result()
            raise chosen.failure.result()
        finally:
            call.cancel()
            chosen.calls.remove(place)

    def choose(self, place: str) -> PluginLoop:
        """Return a loop without calls or a new one; if there are too many, the one with the fewest calls."""
        core = asyncio.get_running_loop()
        for other in [one for one in self._loops if one.failure.get_loop() is not core]:  # of a former loop of core
            self._loops.remove(other)
            other.end()
        self._abandoned = [one for one in self._abandoned if one.thread.is_alive()]
        best = min(self._loops, key=lambda one: (one.is_silent, len(one.calls)), default=None)
        if best is not None and not best.is_silent and not best.calls:
            return best
        if len(self._loops) + len(self._abandoned) < self.max_loops:
            loop, is_over = asyncio.new_event_loop(), threading.Event()
            name = f"loop of {self.guard.kind} {self.guard.name}"
            thread = threading.Thread(target=_serve, args=(loop, is_over), name=name, daemon=True)
            best = PluginLoop(loop, core.create_future(), thread, is_over)
            best.thread.start()
            self._loops.append(best)
        if best is None:
            what = f"is busy: {len(self._abandoned)} of its event loops are held by calls that do not return"
            raise self.guard.mistake(place, what)
        return best

    def end(self) -> None:
        """End the loops; a later call gets a new one."""
        loops, self._loops = self._loops, []
        for one in loops:
            one.end()

    async def _watch(self, watched: PluginLoop, timeout_s: float) -> None:
        """Give a loop up if it does not react, until it has no calls."""
        core = asyncio.get_running_loop()
        while watched.calls:
            beat = core.create_future()
            watched.loop.call_soon_threadsafe(_react, core, beat)
            await asyncio.wait((beat,), timeout=min(_SILENT_S, timeout_s))
            watched.is_silent = not beat.done()
            if watched.is_silent:
                await asyncio.wait((beat,), timeout=timeout_s)
                watched.is_silent = not beat.done()
            if watched.is_silent:
                self._give_up(watched, timeout_s)
                return
            await asyncio.sleep(min(0.5, timeout_s / 4))
        watched.watch = None

    def _give_up(self, held: PluginLoop, timeout_s: float) -> None:
        assert held.thread.ident is not None
        where = stack_of(held.thread.ident)
        places = " or ".join(dict.fromkeys(held.calls)) or "a task"
        what = f"blocked an event loop of the plugin for {timeout_s:g} s"
        held.failure.set_result(self.guard.mistake(places, what, more=where))
        if held in self._loops:
            self._loops.remove(held)
        self._abandoned.append(held)
        held.end()
        stop_thread(held.thread.ident)


def _serve(loop: asyncio.AbstractEventLoop, is_over: threading.Event) -> None:
    """Run a loop until core has ended it; the work of a thread."""
    asyncio.set_event_loop(loop)
    with contextlib.suppress(Abandoned):
        while not is_over.is_set():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # in a task of the plugin, which may also stop it
                loop.run_forever()
        if rest := asyncio.all_tasks(loop):
            for task in rest:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait(rest))
        loop.close()


def _settle(beat: asyncio.Future[None]) -> None:
    if not beat.done():
        beat.set_result(None)


def _react(core: asyncio.AbstractEventLoop, beat: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # core's loop has ended
        core.call_soon_threadsafe(_settle, beat)


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

    async def iterate(self, items: AsyncIterator[_T]) -> AsyncGenerator[_T]:
        """Yield the items, each of which is produced there."""
        end = object()
        try:
            while (item := await self.run(lambda: anext(items, end))) is not end:
                yield cast(_T, item)
        finally:
            if isinstance(items, AsyncGenerator):
                await self.run(items.aclose)


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
            return lambda *arguments, **named: self._call(lambda: member(*arguments, **named))
        return member

    def _call(self, work: Callable[[], Any]) -> Any:
        found = self._core.call(work)
        return self._core.iterate(found) if isinstance(found, AsyncIterator) else found
