"""The guard around every call into a plugin: it names the plugin that fails, and keeps its failure from spreading.

A :class:`Guard` belongs to one object of a plugin. :func:`guarded` returns that object with the guard around each
method of its contract; what such a method returns is guarded in turn if its type is in :data:`_GUARDED`, so a format is
guarded as its parser is. The registry holds guarded objects. In the decode loop plain objects are called, inside a
``try`` whose handler asks their guard.

A guarded call

- lets errors of the contract pass: a :class:`RequestError` is the client's mistake;
- turns any other exception, ``SystemExit`` included, into :class:`PluginFailed`, which names the plugin and nothing
  else; the traceback is in the log, once per plugin, kind, place and minute;
- checks the type of the result (``results``);
- warns, once a minute, if it takes longer than it should.

Plugins of the distribution of Enginehouse are called where core is, on the event loop. What others do while requests
are served runs in threads of each object, with a time limit, so that no other request waits for it: :data:`_BOUNDED`
lists their interfaces, and :meth:`Guard.run` calls them from the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from attrs import define, evolve, field, frozen

from enginehouse.contract.backend import Backend, CutPlanner, DeviceSampler, Drawn, Runner, StateKeeper
from enginehouse.contract.compressor import CompressionTask, Compressor, Range, cut
from enginehouse.contract.drafter import BoundDrafter, Drafter, LayerBackend, LayerDrafter
from enginehouse.contract.errors import ConfigError, EnginehouseError, PluginFailed, RequestError
from enginehouse.contract.exit_policy import ExitPolicy, LayerAccess
from enginehouse.contract.model_hub import ModelHub
from enginehouse.contract.parsers import (
    ReasoningFormat,
    ReasoningParser,
    ReasoningSession,
    ToolFormat,
    ToolParser,
    ToolSession,
)
from enginehouse.contract.preparer import BoundPreparer, Preparer
from enginehouse.contract.router import ChecksModels, Router
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.structured import Grammar, GrammarCompiler, StructuredDecoder
from enginehouse.contract.surface import Surface
from enginehouse.plugins.call_notes import CallNotes, NotedCall
from enginehouse.plugins.plugin_loops import PluginLoop, PluginLoops
from enginehouse.plugins.results import Expectation
from enginehouse.plugins.threads import Abandoned, PluginThreads

_log = logging.getLogger("enginehouse.plugins")

_T = TypeVar("_T")

PASSED = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Abandoned)
"""Exceptions that are never a plugin's failure: they end the task, the process, the generator or an abandoned call."""

_OWN_PACKAGES = re.compile(r"enginehouse(_\w+)?(\.|$)")
_OWN_DISTRIBUTIONS = ("enginehouse", "enginehouse_testkit")

current_request: ContextVar[Callable[[], str] | None] = ContextVar("current_request", default=None)
"""Returns the id of the request that the current task of the server works on."""

_LOG_EVERY_S = 60.0

_GUARDED: dict[type[Any], tuple[type[Any], ...]] = {
    Backend: (LayerBackend,),
    BoundDrafter: (),
    BoundPreparer: (),
    Compressor: (),
    Drafter: (LayerDrafter,),
    Drawn: (),
    ExitPolicy: (),
    Grammar: (),
    GrammarCompiler: (),
    ModelHub: (),
    Preparer: (),
    ReasoningFormat: (),
    ReasoningParser: (),
    ReasoningSession: (),
    Router: (ChecksModels,),
    Runner: (CutPlanner, DeviceSampler, LayerAccess, StateKeeper),
    SamplerPlugin: (),
    StructuredDecoder: (),
    Surface: (),
    ToolFormat: (),
    ToolParser: (),
    ToolSession: (),
}
"""Interfaces whose objects are guarded, each with its optional interfaces."""

_GUARDED_BY_CALLER = frozenset({(Runner, "forward")})
"""Methods whose failures the engine distributes among the requests of a batch."""

_NOTHING_PASSES = (BoundDrafter, ReasoningSession, ToolSession)
_ONLY_REQUEST_ERRORS: tuple[type[Any], ...] = (Router, ToolParser, ToolFormat, ReasoningParser, ReasoningFormat)

_BOUNDED = (
    BoundPreparer,
    Compressor,
    GrammarCompiler,
    ReasoningFormat,
    ReasoningParser,
    ReasoningSession,
    Router,
    ToolFormat,
    ToolParser,
    ToolSession,
)
"""Interfaces that are called while requests are served, on threads that other requests need."""

_MAX_CALL_S: dict[type[Any], float] = {Compressor: 600.0}
"""Time limits in seconds that are not ``limits.plugin_timeout_s``: a compressor may ask models."""

_MAX_S = {
    (Router, "route"): 0.01,
    (BoundPreparer, "may_prepare"): 0.01,
    (ToolSession, "push"): 0.05,
    (ToolSession, "flush"): 0.05,
    (ReasoningSession, "push"): 0.05,
    (ReasoningSession, "flush"): 0.05,
}
"""Seconds after which a call is reported as slow."""


def _check_ranges(kept: Sequence[Sequence[Range]], task: CompressionTask, *_: Any) -> str | None:
    """Return what is wrong with the ranges of a compressor."""
    if len(kept) != len(task.texts):
        return f"says what to keep of {len(kept)} texts, not of {len(task.texts)}"
    try:
        for text, ranges in zip(task.texts, kept, strict=True):
            cut(text, ranges)
    except (TypeError, ValueError) as error:
        return f"gave ranges that cannot be kept: {error}"
    return None


_HOLDS_ALL = "it runs on the event loop, so every other request waits"
_HOLDS_ONE = "its request waits"

_CHECKS: dict[tuple[type[Any], str], Callable[..., str | None]] = {(Compressor, "compress"): _check_ranges}
"""Checks of results beyond their type: called with the result and the arguments, they return what is wrong."""


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
                packed = NotedCall(self.plugin, self.kind, self.name, place, self.request_id).pack()
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
        """Call a function of the plugin that is not a method of a guarded object.

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

    @contextmanager
    def calling(self, place: str, passes: type[EnginehouseError] = EnginehouseError) -> Iterator[None]:
        """Guard the block; exceptions of the type ``passes`` are propagated unchanged."""
        self.enter(place)
        try:
            yield
        except (*PASSED, passes):
            raise
        except BaseException as error:
            raise self.failed(place, error) from error
        finally:
            self.leave()


def guarded(candidate: _T, interface: Any, guard: Guard) -> _T:
    """Return an object of a plugin with the guard around the methods of its interface.

    Further attributes are those of the object. Unchanged are objects that are guarded already, and those of interfaces
    that are called in the decode loop, or only by plugins.
    """
    if interface not in _GUARDED or isinstance(candidate, _Guarded):
        return candidate
    implementation: Any = type(candidate)
    present, absent = _members(implementation, interface)
    if absent:  # a method may be an attribute of the object
        present = (*present, *((declared, name) for declared, name in absent if hasattr(candidate, name)))
    is_bounded = interface in _BOUNDED and guard.threads is not None
    return cast(_T, _class_of(interface, present, is_bounded)(candidate, guard))


def guarded_function(function: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    """Return a function that a plugin registered, with the guard around it; its result is not checked."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with guard.calling("its function"):
            return function(*arguments, **named)

    return call


def is_own(distribution: str) -> bool:
    """Return True if a plugin of that distribution is our own: it is called on the event loop, without a time limit."""
    return distribution in _OWN_DISTRIBUTIONS


def guard_of(candidate: Any, kind: str, name: str = "") -> Guard:
    """Return the guard of a guarded object; for another one, a guard that names its module as the plugin."""
    guard: Guard | None = getattr(candidate, "_enginehouse_guard", None)
    if guard is None:
        module = str(getattr(candidate, "__module__", type(candidate).__module__))
        name = name or str(getattr(candidate, "name", type(candidate).__name__))
        of_us = _OWN_PACKAGES.match(module) is not None
        guard = Guard.of_plugin(module, kind, name, PluginFailures(), is_own=of_us)
    return guard


def are_foreign(*objects: Any) -> bool:
    """Return True if one of these guarded objects is not our own, so that calling it could hold the event loop."""
    guards = (getattr(candidate, "_enginehouse_guard", None) for candidate in objects)
    return any(guard is not None and guard.threads is not None for guard in guards)


def plain(candidate: _T) -> _T:
    """Return the plugin's own object of a guarded one."""
    return cast(_T, getattr(candidate, "_enginehouse_object", candidate))


class _Guarded:
    """Base class of guarded objects."""

    __slots__ = ("_enginehouse_guard", "_enginehouse_object")

    def __init__(self, candidate: Any, guard: Guard) -> None:
        self._enginehouse_object = candidate
        self._enginehouse_guard = guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._enginehouse_object, name)

    def __eq__(self, other: object) -> bool:
        return plain(other) is self._enginehouse_object

    def __hash__(self) -> int:
        return id(self._enginehouse_object)

    def __repr__(self) -> str:
        return f"<{self._enginehouse_guard}>"


_Members = tuple[tuple[type[Any], str], ...]
"""Names of methods, each after the interface that declares it."""


@cache
def _members(implementation: Any, interface: Any) -> tuple[_Members, _Members]:
    """Return the methods of an interface and its optional ones that a class has, and those that it lacks."""
    found: dict[str, type[Any]] = {}
    for declared in (interface, *_GUARDED[interface]):
        for name, _ in inspect.getmembers(declared, inspect.isfunction):
            if not name.startswith("_") and (interface, name) not in _GUARDED_BY_CALLER:
                found.setdefault(name, declared)
    pairs = [(declared, name) for name, declared in found.items()]
    present = tuple(pair for pair in pairs if hasattr(implementation, pair[1]))
    return present, tuple(pair for pair in pairs if pair not in present)


@cache
def _class_of(interface: Any, members: _Members, is_bounded: bool) -> type[_Guarded]:
    """Create the class of guarded objects that have these methods; ``isinstance`` finds the attributes as well.

    Args:
        is_bounded: the methods run in the threads of the guard.
    """
    attributes: dict[str, Any] = {"__slots__": ()}
    for declared in (interface, *_GUARDED[interface]):
        for name in (*declared.__annotations__, *(name for name, _ in inspect.getmembers(declared, _is_property))):
            attributes[name] = _attribute(name)
    for declared, name in members:
        attributes[name] = _method(interface, declared, name, is_bounded)
    return type(f"Guarded{interface.__name__}", (_Guarded,), attributes)


def _attribute(name: str) -> property:
    def read(self: _Guarded) -> Any:
        return getattr(self._enginehouse_object, name)

    return property(read)


def _is_property(member: Any) -> bool:
    return isinstance(member, property)


def _method(interface: type[Any], declared: type[Any], name: str, is_bounded: bool) -> Callable[..., Any]:
    """Return the guarded method of that name."""
    function = getattr(declared, name)
    result = get_type_hints(function)["return"]
    expectation = Expectation(result, is_share=name == "match" and result is float)
    inner = result if isinstance(result, type) and result in _GUARDED else None
    passed, check = _passed(interface), _CHECKS.get((interface, name))

    def finish(self: _Guarded, value: Any, arguments: tuple[Any, ...]) -> Any:
        guard = self._enginehouse_guard
        found = expectation.check(value)
        if found is None and check is not None:
            found = check(value, *arguments)
        if found is not None:
            raise guard.mistake(name, found, getattr(type(self._enginehouse_object), name, None))
        return guarded(value, inner, guard) if inner is not None else value

    def call(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        guard = self._enginehouse_guard
        guard.enter(name)
        try:
            value = getattr(self._enginehouse_object, name)(*arguments, **named)
        except passed:
            raise
        except BaseException as error:
            raise guard.failed(name, error) from error
        finally:
            guard.leave()
        return finish(self, value, arguments)

    async def call_async(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        try:
            value = await getattr(self._enginehouse_object, name)(*arguments, **named)
        except passed:
            raise
        except BaseException as error:
            raise self._enginehouse_guard.failed(name, error) from error
        return finish(self, value, arguments)

    if inspect.iscoroutinefunction(function):
        chosen: Callable[..., Any] = call_async
    elif is_bounded:
        chosen = _in_thread(call, name, _MAX_S.get((interface, name)), _MAX_CALL_S.get(interface))
    else:
        chosen = _timed(call, name, _MAX_S.get((interface, name)))
    chosen.__name__, chosen.__doc__ = name, function.__doc__
    return chosen


def _timed(call: Callable[..., Any], name: str, max_s: float | None) -> Callable[..., Any]:
    """Return a method on the event loop with a warning if it takes longer than ``max_s``."""
    if max_s is None:
        return call

    def timed(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        value = call(self, *arguments, **named)
        if (seconds := time.perf_counter() - began) > max_s:
            guard = self._enginehouse_guard
            guard.failures.slow(guard, name, seconds, max_s=max_s, consequence=_HOLDS_ALL)
        return value

    return timed


def _in_thread(
    call: Callable[..., Any], name: str, max_s: float | None, max_call_s: float | None
) -> Callable[..., Any]:
    """Return a method that runs in the threads of its guard.

    Args:
        max_s: seconds after which a warning is logged.
        max_call_s: time limit instead of the usual one.
    """

    def timed(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        if max_s is None:
            return call(self, *arguments, **named)
        began, cpu_began = time.perf_counter(), time.thread_time()
        value = call(self, *arguments, **named)
        if (seconds := time.perf_counter() - began) > max_s:
            guard, cpu_s = self._enginehouse_guard, time.thread_time() - cpu_began
            guard.failures.slow(guard, name, seconds, max_s=max_s, consequence=_HOLDS_ONE, cpu_s=cpu_s)
        return value

    def in_thread(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        work = functools.partial(timed, self, *arguments, **named)
        return self._enginehouse_guard.wait_for(name, work, max_call_s)

    return in_thread


def _passed(interface: type[Any]) -> tuple[type[BaseException], ...]:
    """Return the exceptions of an interface that are propagated unchanged."""
    if interface in _NOTHING_PASSES:
        return PASSED
    if interface in _ONLY_REQUEST_ERRORS:
        return (*PASSED, RequestError, ConfigError, PluginFailed)
    return (*PASSED, EnginehouseError)


def _location(function: Callable[..., Any] | None) -> str:
    """Return the file and line of a function, in brackets."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
