"""Threads and event loops for calls into a plugin that may block: bounded in number, not waited for at the exit.

A call that takes too long is abandoned: its caller continues with an error that names the plugin, and an exception is
raised in its thread, which ends a loop in Python. A call that waits outside of Python keeps its thread until it
returns, so a plugin that hangs uses up its own threads and no others.

Coroutines of one plugin object have event loops of their own. A call gets a loop without other calls while there are
few, so a coroutine that blocks delays no other one. Core's loop watches the loops in use: if one does not react within
the time limit, its calls fail and it is replaced. What a coroutine awaits is not limited here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextvars import ContextVar
from operator import methodcaller
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from attrs import define, field

from enginehouse.contract.errors import EnginehouseError, PluginFailed

_T = TypeVar("_T")

caller_has_left: ContextVar[Callable[[], bool] | None] = ContextVar("caller_has_left", default=None)
"""Function that is True once no one needs the result of the current thread; then calls into plugins are refused."""


class NamesPlugin(Protocol):
    """Names the object of a plugin: a :class:`enginehouse.plugins.guard.Guard`."""

    @property
    def kind(self) -> str:
        """Noun of the kind of object."""
        ...

    @property
    def name(self) -> str:
        """Name of the object."""
        ...

    def mistake(self, place: str, what: str, function: None = None, more: str = "") -> PluginFailed:
        """Count and log a failure; returns the error to raise."""


class Abandoned(BaseException):
    """Raised in the thread of a call that was abandoned."""


@define(eq=False)
class _Call:
    """One call.

    Attributes:
        thread: identifier of the thread that runs it.
        is_abandoned: its caller has stopped waiting.
        is_over: the plugin has returned.
    """

    work: Callable[[], Any]
    outcome: Future[Any] = field(factory=Future)
    thread: int | None = None
    is_abandoned: bool = False
    is_over: bool = False
    lock: threading.Lock = field(factory=threading.Lock)


@define(eq=False)
class PluginThreads:
    """The threads of one object of a plugin; started when they are needed.

    Attributes:
        guard: names the plugin.
        num_threads: maximum number of concurrent calls.
        max_waiting: maximum number of calls that wait for a thread.
    """

    guard: NamesPlugin
    num_threads: int = 8
    max_waiting: int = 64
    _waiting: SimpleQueue[_Call | None] = field(factory=SimpleQueue, init=False)  # None ends the thread that gets it
    _num_open: int = field(default=0, init=False)
    _num_started: int = field(default=0, init=False)
    _num_abandoned: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    async def run(self, place: str, work: Callable[[], _T], timeout_s: float) -> _T:
        """Return ``work()``, a guarded call, run in one of the threads; called on an event loop.

        Cancellation does not wait for the call.

        Args:
            place: name of the method, for messages.
            work: the call.
            timeout_s: maximum time, waiting for a thread included.

        Raises:
            PluginFailed: the call took too long, or too many calls wait.
        """
        call = self._submit(place, work)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result: _T = await asyncio.wrap_future(call.outcome)
                return result
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._abandon(call, place, timeout_s) from None
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(timeout_s, self._stop, call)
            raise

    def call(self, place: str, work: Callable[[], _T], timeout_s: float) -> _T:
        """Like :meth:`run`, from any thread, which waits; in one of these threads, ``work`` is called directly."""
        if getattr(threading.current_thread(), "plugin_threads", None) is self:
            return work()
        if (has_left := caller_has_left.get()) is not None and has_left():
            raise asyncio.CancelledError
        call = self._submit(place, work)
        try:
            result: _T = call.outcome.result(timeout_s)
        except TimeoutError:
            if not call.outcome.done():
                raise self._abandon(call, place, timeout_s) from None
            result = call.outcome.result()  # it has returned at this moment, or the error is its own
        return result

    def _submit(self, place: str, work: Callable[[], _T]) -> _Call:
        context = contextvars.copy_context()  # the guard finds the request in it
        call = _Call(lambda: context.run(work))
        busy, starts = "", False
        with self._lock:
            if self._num_abandoned >= self.num_threads:
                busy = f"is busy: {self._num_abandoned} calls took too long and have not returned yet"
            elif self._num_open >= self.num_threads + self.max_waiting:
                busy = f"is busy: {self._num_open} calls have not returned yet"
            else:
                self._num_open += 1
                starts = self._num_started < min(self._num_open, self.num_threads)
                self._num_started += starts
        if busy:
            raise self.guard.mistake(place, busy)
        if starts:
            _Thread(self, f"{self.guard.kind} {self.guard.name}").start()
        self._waiting.put(call)
        return call

    def _abandon(self, call: _Call, place: str, timeout_s: float) -> PluginFailed:
        """Stop a call that took too long; returns the error to raise."""
        where = stack_of(call.thread) if call.thread is not None else "\n  it waited for a thread"
        self._stop(call)
        return self.guard.mistake(place, f"did not return within {timeout_s:g} s", more=where)

    def _stop(self, call: _Call) -> None:
        """End a call whose result is not needed, unless it is over."""
        with call.lock:
            if call.thread is None:
                call.outcome.cancel()
            elif not (call.is_over or call.is_abandoned):
                call.is_abandoned = True
                with self._lock:
                    self._num_abandoned += 1
                stop_thread(call.thread)

    def end(self) -> None:
        """End the threads, each once its call has returned; a later call starts a new one."""
        with self._lock:
            num_threads, self._num_started = self._num_started, 0
        for _ in range(num_threads):
            self._waiting.put(None)

    def serve(self) -> None:
        """Run calls; the work of a thread."""
        while (call := self._waiting.get()) is not None:
            self._serve(call)
            with self._lock:
                self._num_open -= 1
                self._num_abandoned -= call.is_abandoned
            del call  # its result may be large

    @staticmethod
    def _serve(call: _Call) -> None:
        with call.lock:
            if not call.outcome.set_running_or_notify_cancel():
                return
            call.thread = threading.get_ident()
        settle: Callable[[Future[Any]], None] = methodcaller("set_result", None)
        try:
            settle = outcome_of(call.work)
            with call.lock:  # from here on, nothing is raised in this thread
                call.is_over = True
            _let_exception_arrive()
        except Abandoned:
            call.is_over = True
        settle(call.outcome)


class _Thread(threading.Thread):
    """A thread of one object of a plugin."""

    def __init__(self, plugin_threads: PluginThreads, name: str) -> None:
        super().__init__(target=plugin_threads.serve, name=name, daemon=True)
        self.plugin_threads = plugin_threads


def outcome_of(work: Callable[[], Any]) -> Callable[[Any], None]:
    """Run ``work``; returns what settles a future with its result or exception, which is raised where it is awaited."""
    try:
        return methodcaller("set_result", work())
    except StopIteration as error:  # a future does not accept it: its task would wait forever
        early = RuntimeError("StopIteration")
        early.__cause__ = error
        return methodcaller("set_exception", early)
    except BaseException as error:  # noqa: BLE001 - guard of threads: the waiting thread or task gets any exception
        return methodcaller("set_exception", error)


def _let_exception_arrive() -> None:
    """Do nothing: an exception that another thread raises in this one arrives where a function begins."""


def stop_thread(thread: int) -> None:
    """Raise :class:`Abandoned` in a thread, once it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Abandoned))


def stack_of(thread: int) -> str:
    """Return where a thread is now."""
    frame = sys._current_frames().get(thread)
    return "\n" + "".join(traceback.format_stack(frame)) if frame is not None else ""


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
