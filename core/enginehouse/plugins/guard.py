"""The guard around every call into a plugin: it names the plugin that fails, and keeps its failure from spreading.

A :class:`Guard` belongs to one object of a plugin, and the registry holds objects with the guard around each method of
their contract (see ``guarded``). In the decode loop plain objects are called, inside a ``try`` whose handler asks their
guard.

A guarded call

- lets errors of the contract pass: a :class:`RequestError` is the client's mistake;
- turns any other exception, ``SystemExit`` included (see :func:`passed`), into :class:`PluginFailed`, which names the
  plugin and nothing else; the traceback is in the log, once per object, place and minute;
- checks the type of the result (``results``);
- warns, once a minute, if it takes longer than it should.

:class:`Contained` is the guard of the other kind: around core's own work for one request or model.

Plugins of the distribution of Enginehouse are called where core is, on the event loop. What others do while requests
are served runs in threads of each object, with a time limit, so that no other request waits for it;
:meth:`Guard.run` and :meth:`Guard.run_async` call it from the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import EnginehouseError, GenerationFailed, PluginFailed
from enginehouse.plugins.call_notes import CallNotes, NotedCall
from enginehouse.plugins.threads import Abandoned, PluginLoop, PluginLoops, PluginThreads, caller_has_left

_log = logging.getLogger("enginehouse.plugins")

_T = TypeVar("_T")

_OWN_PACKAGES = re.compile(r"enginehouse(_\w+)?(\.|$)")
_OWN_DISTRIBUTIONS = ("enginehouse", "enginehouse_testkit")

current_request: ContextVar[Callable[[], str] | None] = ContextVar("current_request", default=None)
"""Function that returns the id of the request that the current task of the server works on."""

_LOG_EVERY_S = 60.0


def passed(*errors: type[EnginehouseError]) -> tuple[type[BaseException], ...]:
    """Return the exceptions that are not failures of a plugin in the current thread, ``errors`` among them.

    Tasks and their generators end where an event loop runs, nested calls once their caller has left. Ctrl-C raises
    ``KeyboardInterrupt`` in the main thread, and not in a server or a worker, which have other handlers.
    """
    has_left = caller_has_left.get()
    if _has_event_loop() or (has_left is not None and has_left()):
        ends: tuple[type[BaseException], ...] = (asyncio.CancelledError, GeneratorExit, Abandoned)
    else:
        ends = (Abandoned,)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return (*errors, *ends, KeyboardInterrupt)
    return (*errors, *ends)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@define(eq=False)
class PluginFailures:
    """Failures of plugins in one process: counted, and each place logged once a minute. Any thread.

    Attributes:
        counts: number of failures by plugin and kind.
        notes: where the calls of a worker process are noted; None in other processes.
        max_call_s: time limit of calls that run in threads of a plugin (``limits.plugin_timeout_s``).
    """

    counts: Counter[tuple[str, str]] = field(factory=Counter)
    notes: CallNotes | None = None
    max_call_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _logged_s: dict[tuple[str, ...], float] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def note(self, guard: Guard, place: str, error: BaseException | None, text: str, more: str = "") -> None:
        """Count a failure; log ``text`` and ``more``, and the traceback of ``error`` if there is one."""
        with self._lock:
            self.counts[guard.plugin, guard.kind] += 1
        if self._is_new(guard.plugin, guard.kind, guard.name, place):
            request = f" (request {request_id})" if (request_id := guard.find_request()) else ""
            _log.error("%s%s; for a minute, more of this is only counted%s", text, request, more, exc_info=error)

    def slow(
        self,
        guard: Guard,
        place: str,
        seconds: float,
        *,
        max_s: float,
        consequence: str,
        cpu_s: float | None = None,
    ) -> None:
        """Warn of a call that took too long.

        Args:
            seconds: elapsed time.
            consequence: who waits for it.
            cpu_s: processor time of its thread; far less than ``seconds`` if it waited, or the machine was busy.
        """
        if self._is_new(guard.plugin, guard.kind, guard.name, place, "slow"):
            computing = f" ({1000 * cpu_s:.0f} ms of processor time)" if cpu_s is not None else ""
            text = "%s took %.0f ms%s in %s, longer than %.0f ms: %s"
            _log.warning(text, guard, 1000 * seconds, computing, place, 1000 * max_s, consequence)

    def _is_new(self, *key: str) -> bool:
        with self._lock:
            now = self.clock()
            if now - self._logged_s.get(key, float("-inf")) < _LOG_EVERY_S:
                return False
            self._logged_s[key] = now
            return True


@frozen(eq=False)
class Guard:
    """The guard of one object of a plugin.

    Attributes:
        plugin: name of the plugin's entry point.
        kind: noun of the kind of object.
        name: name of the object.
        failures: where failures are counted and logged.
        is_own: the plugin belongs to the distribution of Enginehouse, see :func:`is_own`.
        request_id: the request for which it is called, if that is always the same one.
        threads: where the object is called while requests are served; None for our own plugins.
        loops: where its coroutines run; None for our own plugins.
    """

    plugin: str
    kind: str
    name: str
    failures: PluginFailures = field(factory=PluginFailures, repr=False)
    is_own: bool = True
    request_id: str = ""
    threads: PluginThreads | None = field(default=None, repr=False)
    loops: PluginLoops | None = field(default=None, repr=False)
    _packed: dict[str, bytes] = field(factory=dict, init=False, repr=False)

    @classmethod
    def of_plugin(cls, plugin: str, kind: str, name: str, failures: PluginFailures, *, is_own: bool) -> Guard:
        """Create the guard of an object, with threads if it is not our own."""
        guard = cls(plugin, kind, name, failures, is_own)
        return guard if is_own else evolve(guard, threads=PluginThreads(guard), loops=PluginLoops(guard))

    def __str__(self) -> str:
        """Name the object, as in "the sampler 'xtc' of the plugin 'samplers'"."""
        return f"the {self.kind} {self.name!r} of the plugin {self.plugin!r}"

    def find_request(self) -> str:
        """Return the id of the request for which the plugin is called now; empty if unknown."""
        if self.request_id:
            return self.request_id
        find = current_request.get()
        return find() if find is not None else ""

    def of_request(self, request_id: str) -> Guard:
        """Return this guard for calls on behalf of one request."""
        return evolve(self, request_id=request_id)

    def enter(self, place: str) -> None:
        """Note the beginning of a call, so that it is known if the process does not survive it."""
        notes = self.failures.notes
        if notes is not None:
            packed = self._packed.get(place)
            if packed is None:
                packed = NotedCall(self.plugin, self.kind, self.name, place, self.request_id, self.is_own).pack()
                self._packed[place] = packed
            notes.enter(packed)

    def leave(self) -> None:
        """Note the end of a call."""
        if self.failures.notes is not None:
            self.failures.notes.leave()

    def failed(self, place: str, error: BaseException) -> PluginFailed:
        """Count and log an exception; returns the error to raise, whose text names the plugin only."""
        if isinstance(error, PluginFailed):
            return error  # it is noted, and names the plugin that it came from
        text = f"{self} failed in {place}"
        self.failures.note(self, place, error, text)
        return PluginFailed(f"{text[0].upper()}{text[1:]}.", self.plugin, self.kind)

    def mistake(
        self, place: str, what: str, function: Callable[..., Any] | None = None, more: str = ""
    ) -> PluginFailed:
        """Count and log a wrong result; returns the error to raise.

        Args:
            what: the sentence after the name of the method, such as ``gave str, a float was expected``.
            function: what gave it, for its file and line.
            more: further text for the log.
        """
        text = f"{self}: {place} {what}"
        self.failures.note(self, place, None, text + _location(function), more)
        return PluginFailed(f"{text[0].upper()}{text[1:]}.", self.plugin, self.kind)

    def call(self, place: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function of the plugin that is not a method of a guarded object, such as one of the decode loop.

        Raises:
            EnginehouseError: raised by the plugin.
            PluginFailed: the plugin raised anything else.
        """
        with self.calling(place):
            return function(*arguments)

    async def run(self, place: str, work: Callable[[], _T]) -> _T:
        """Return ``work()``, which calls the object: directly if it is our own, else in one of its threads.

        Called on the event loop, which is free meanwhile.

        Raises:
            PluginFailed: it took longer than ``limits.plugin_timeout_s``, or too many of its calls do.
        """
        return work() if self.threads is None else await self.threads.run(place, work, self.failures.max_call_s)

    async def run_async(self, place: str, start: Callable[[], Awaitable[_T]], on: PluginLoop | None = None) -> _T:
        """Return ``await start()``, a coroutine of the object: here if it is our own, else on a loop of its own.

        Called on the event loop, which is free meanwhile.

        Args:
            on: that loop, chosen by its ``loops``.

        Raises:
            PluginFailed: it failed, or its loop was held for longer than ``limits.plugin_timeout_s``.
        """
        if self.loops is None:
            return await start()

        async def guarded_start() -> _T:
            with self.calling(place):
                return await start()

        return await self.loops.run(place, guarded_start, self.failures.max_call_s, on)

    def wait_for(self, place: str, work: Callable[[], _T], max_s: float | None = None) -> _T:
        """Like :meth:`run`, for other threads than that of the event loop; ``max_s`` replaces the usual limit."""
        if self.threads is None:
            return work()
        return self.threads.call(place, work, self.failures.max_call_s if max_s is None else max_s)

    def end_threads(self) -> None:
        """End the threads and loops of the object, which are started again when they are needed."""
        if self.threads is not None and self.loops is not None:
            self.threads.end()
            self.loops.end()

    def calling(
        self, place: str, *, passes: tuple[type[EnginehouseError], ...] = (EnginehouseError,), is_noted: bool = True
    ) -> _Calling:
        """Return the guard of a ``with`` block that calls the plugin.

        Args:
            passes: errors that are propagated unchanged; any other exception becomes PluginFailed.
            is_noted: note the call; False if the block awaits, as a thread notes one call at a time.
        """
        return _Calling(self, place, passes, is_noted)


class _Calling:
    """The guard of one call; a class, as it is used for every token and generators take three times as long."""

    __slots__ = ("_guard", "_is_noted", "_passes", "_place")

    def __init__(self, guard: Guard, place: str, passes: tuple[type[EnginehouseError], ...], is_noted: bool) -> None:
        self._guard = guard
        self._place = place
        self._passes = passes
        self._is_noted = is_noted

    def __enter__(self) -> None:
        if self._is_noted:
            self._guard.enter(self._place)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._is_noted:
            self._guard.leave()
        if error is not None and not isinstance(error, passed(*self._passes)):
            raise self._guard.failed(self._place, error) from error


class Contained:
    """Guard of one request or model: an exception in the ``with`` block fails it, and goes no further.

    Such an exception is an error of core itself, since plugins have guards of their own. Can be used again, also while
    it is in use.

    Args:
        fail: called with the error.
        what: sentence for the log and the client, such as "checking the request failed".
    """

    __slots__ = ("_fail", "_what")

    def __init__(self, fail: Callable[[EnginehouseError], object], what: str) -> None:
        self._fail = fail
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, EnginehouseError):
            self._fail(error)
        elif isinstance(error, Exception):
            _log.error("%s", self._what, exc_info=error)
            self._fail(GenerationFailed(f"{self._what[0].upper()}{self._what[1:]}: {type(error).__name__}: {error}"))
        return isinstance(error, Exception)


def is_own(distribution: str) -> bool:
    """Return True if a plugin of that distribution is our own: it is called on the event loop, without a time limit."""
    return distribution in _OWN_DISTRIBUTIONS


def guard_of(candidate: Any, kind: str, name: str = "") -> Guard:
    """Return the guard of a guarded object; for another one, a guard that names its module as the plugin."""
    guard = _guard_at(candidate)
    if guard is None:
        module = str(getattr(candidate, "__module__", type(candidate).__module__))
        name = name or str(getattr(candidate, "name", type(candidate).__name__))
        of_us = _OWN_PACKAGES.match(module) is not None
        guard = Guard.of_plugin(module, kind, name, PluginFailures(), is_own=of_us)
    return guard


def are_foreign(*objects: Any) -> bool:
    """Return True if one of these guarded objects is not our own, so that calling it could hold the event loop."""
    for one in objects:
        if one is not None and (guard := _guard_at(one)) is not None and guard.threads is not None:
            return True
    return False


def plain(candidate: Any) -> Any:
    """Return the plugin's own object of a guarded one."""
    return candidate._enginehouse_object if _guard_at(candidate) is not None else candidate


def _guard_at(candidate: Any) -> Guard | None:
    """Return the guard of a guarded object; a plugin's object may have any attribute."""
    guard = getattr(candidate, "_enginehouse_guard", None)
    return guard if isinstance(guard, Guard) else None


def _location(function: Callable[..., Any] | None) -> str:
    """Return the file and line of a function, in parentheses."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
