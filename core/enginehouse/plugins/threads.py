"""Threads for calls into a plugin that may block: bounded in number, and not waited for when the process exits.

A call that takes too long is abandoned; its thread stays occupied until the call returns, so a plugin that hangs uses
up its own threads and no others. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from attrs import define, field

from enginehouse.plugins.guard import Guard

_T = TypeVar("_T")


@define(eq=False)
class _Call:
    """One call; ``thread`` is the identifier of the thread that runs it."""

    work: Callable[[], Any]
    outcome: Future[Any] = field(factory=Future)
    thread: int | None = None


@define(eq=False)
class PluginThreads:
    """The threads of one object of a plugin; started when they are needed.

    Attributes:
        guard: names the plugin.
        num_threads: maximum number of concurrent calls.
        max_waiting: maximum number of calls that wait for a thread.
    """

    guard: Guard
    num_threads: int = 8
    max_waiting: int = 64
    _waiting: SimpleQueue[_Call] = field(factory=SimpleQueue, init=False)
    _num_open: int = field(default=0, init=False)
    _num_started: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    async def run(self, place: str, work: Callable[[], _T], timeout_s: float) -> _T:
        """Return ``work()``, a guarded call, run in one of the threads.

        Args:
            place: name of the method, for messages.
            work: the call.
            timeout_s: maximum time, waiting for a thread included.

        Raises:
            PluginFailed: the call took too long, or too many calls wait.
        """
        call = _Call(self._with_context(work))
        with self._lock:
            if self._num_open >= self.num_threads + self.max_waiting:
                busy = f"is busy: {self._num_open} calls have not returned yet"
            else:
                busy = ""
                self._num_open += 1
                starts = self._num_started < min(self._num_open, self.num_threads)
                self._num_started += starts
        if busy:
            raise self.guard.mistake(place, busy)
        if starts:
            threading.Thread(target=self._serve, name=f"{self.guard.kind} {self.guard.name}", daemon=True).start()
        self._waiting.put(call)
        try:
            async with asyncio.timeout(timeout_s):
                result: _T = await asyncio.wrap_future(call.outcome)
                return result
        except TimeoutError:
            what = f"did not return within {timeout_s:g} s"
            where = _stack_of(call.thread) if call.thread is not None else "\n  it waited for a thread"
            raise self.guard.mistake(place, what, more=where) from None

    @staticmethod
    def _with_context(work: Callable[[], _T]) -> Callable[[], _T]:
        context = contextvars.copy_context()  # the guard finds the request in it
        return lambda: context.run(work)

    def _serve(self) -> None:
        while True:
            call = self._waiting.get()
            call.thread = threading.get_ident()
            try:
                if call.outcome.set_running_or_notify_cancel():
                    call.outcome.set_result(call.work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                call.outcome.set_exception(error)
            finally:
                with self._lock:
                    self._num_open -= 1


def _stack_of(thread: int) -> str:
    """Return where a thread is now."""
    frame = sys._current_frames().get(thread)
    return "\n" + "".join(traceback.format_stack(frame)) if frame is not None else ""
