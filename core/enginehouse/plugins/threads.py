"""Threads for calls into a plugin that may block: bounded in number, and not waited for when the process exits.

A call that takes too long is abandoned: its caller continues with an error that names the plugin, and an exception is
raised in its thread, which ends a loop in Python. A call that waits outside of Python keeps its thread until it
returns, so a plugin that hangs uses up its own threads and no others.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from operator import methodcaller
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from attrs import define, field

from enginehouse.contract.errors import PluginFailed

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
