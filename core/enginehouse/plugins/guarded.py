"""Guarded objects of plugins: the methods of their contract with the guard around each (see ``guard``).

The tables say which interfaces are guarded, which of them run in threads of the plugin, and how long a call may take.
What a guarded method returns is guarded in turn if its type is among them, so a format is guarded as its parser is.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import numpy as np

from enginehouse.contract.adapters import AdapterKeeper
from enginehouse.contract.backend import Backend, CutPlanner, DeviceSampler, Drawn, Runner, StateKeeper
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.compressor import CompressionTask, Compressor, Range, cut
from enginehouse.contract.drafter import BoundDrafter, Drafter, HeadDrafter, HeadKeeper, LayerBackend, LayerDrafter
from enginehouse.contract.engine import Engine, PoolingEngine, ReplicatedEngine
from enginehouse.contract.errors import ConfigError, EnginehouseError, PluginFailed, RequestError
from enginehouse.contract.exit_policy import ExitPolicy, LayerAccess
from enginehouse.contract.fleet import PlacesWorkers
from enginehouse.contract.inspection import Inspectable
from enginehouse.contract.media import AudioRunner, Embedding, MediaRunner
from enginehouse.contract.model_hub import ModelHub
from enginehouse.contract.parsers import (
    ReasoningFormat,
    ReasoningParser,
    ReasoningSession,
    ToolFormat,
    ToolParser,
    ToolSession,
)
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.preparer import BoundPreparer, Preparer
from enginehouse.contract.router import ChecksModels, ComparesTexts, Router
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.structured import Grammar, GrammarCompiler, StructuredDecoder
from enginehouse.contract.surface import Surface
from enginehouse.plugins.guard import Guard, plain
from enginehouse.plugins.results import Expectation

_T = TypeVar("_T")

_GUARDED: dict[type[Any], tuple[type[Any], ...]] = {
    Backend: (LayerBackend, PlacesWorkers),
    BoundDrafter: (),
    BoundPreparer: (),
    Compressor: (),
    Drafter: (HeadDrafter, LayerDrafter),
    Drawn: (),
    Engine: (Inspectable, PoolingEngine, ReplicatedEngine),
    ExitPolicy: (),
    Grammar: (),
    GrammarCompiler: (),
    ModelHub: (),
    Pooler: (),
    Preparer: (),
    ReasoningFormat: (),
    ReasoningParser: (),
    ReasoningSession: (),
    Router: (ChecksModels, ComparesTexts),
    Runner: (
        AdapterKeeper,
        CheckpointKeeper,
        CutPlanner,
        DeviceSampler,
        HeadKeeper,
        LayerAccess,
        AudioRunner,
        MediaRunner,
        StateKeeper,
    ),
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


def _check_embedding(embedding: Embedding, *_: Any) -> str | None:
    """Return what is wrong with the size of an embedding, by which its memory is counted."""
    size = embedding.nbytes
    if isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0:
        return None
    return f"gave {type(embedding).__name__} whose nbytes is {size!r}, a number of bytes was expected"


_HOLDS_ALL = "it runs on the event loop, so every other request waits"
_HOLDS_ONE = "its request waits"

_CHECKS: dict[tuple[type[Any], str], Callable[..., str | None]] = {
    (Compressor, "compress"): _check_ranges,
    (Runner, "encode"): _check_embedding,
}
"""Checks of results beyond their type: called with the result and the arguments, they return what is wrong."""


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
    optional = _optional_attributes(interface)
    attributes = tuple(name for name in optional if hasattr(implementation, name) or hasattr(candidate, name))
    is_bounded = interface in _BOUNDED and guard.threads is not None
    return cast(_T, _class_of(interface, present, attributes, is_bounded)(candidate, guard))


def guarded_function(function: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    """Return a function that a plugin registered, with the guard around it; its result is not checked."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with guard.calling("its function"):
            return function(*arguments, **named)

    return call


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


def _attributes(interface: Any) -> tuple[str, ...]:
    """Return the names of the attributes and properties that an interface declares."""
    return (*interface.__annotations__, *(name for name, _ in inspect.getmembers(interface, _is_property)))


@cache
def _optional_attributes(interface: Any) -> tuple[str, ...]:
    """Return the names of the attributes and properties of its optional interfaces."""
    return tuple(name for declared in _GUARDED[interface] for name in _attributes(declared))


@cache
def _class_of(interface: Any, members: _Members, optional: tuple[str, ...], is_bounded: bool) -> type[_Guarded]:
    """Create the class of guarded objects that have these methods.

    It has all members of the interface and of the optional ones that the object has, and no others: from Python 3.12
    on, ``isinstance`` reads neither ``__getattr__`` nor properties.

    Args:
        members: methods of both.
        optional: attributes of optional interfaces.
        is_bounded: the methods run in the threads of the guard.
    """
    attributes: dict[str, Any] = {"__slots__": ()}
    by_caller = [name for declared, name in _GUARDED_BY_CALLER if declared is interface]
    attributes |= {name: _attribute(name) for name in (*_attributes(interface), *by_caller, *optional)}
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
    errors, check = _passed_errors(interface), _CHECKS.get((interface, name))

    def finish(self: _Guarded, value: Any, arguments: tuple[Any, ...]) -> Any:
        guard = self._enginehouse_guard
        found = expectation.check(value)
        if found is None and check is not None:
            found = check(value, *arguments)
        if found is not None:
            raise guard.mistake(name, found, getattr(type(self._enginehouse_object), name, None))
        return guarded(value, inner, guard) if inner is not None else value

    def call(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        with self._enginehouse_guard.calling(name, passes=errors):
            value = getattr(self._enginehouse_object, name)(*arguments, **named)
        return finish(self, value, arguments)

    async def call_async(self: _Guarded, *arguments: Any, **named: Any) -> Any:
        with self._enginehouse_guard.calling(name, passes=errors, is_noted=False):
            value = await getattr(self._enginehouse_object, name)(*arguments, **named)
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


def _passed_errors(interface: type[Any]) -> tuple[type[EnginehouseError], ...]:
    """Return the errors of an interface that are propagated unchanged."""
    if interface in _NOTHING_PASSES:
        return ()
    if interface in _ONLY_REQUEST_ERRORS:
        return (RequestError, ConfigError, PluginFailed)
    return (EnginehouseError,)
