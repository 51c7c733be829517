"""Engines that plugins of other distributions open: each runs on an event loop of its own, in a thread of its own.

A step that blocks delays the requests of this engine only. An engine that blocks its loop for longer than
``limits.plugin_timeout_s`` is given up: its requests fail with the plugin's name, and the model is started again. What
its coroutines await is not limited here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast, get_args

from attrs import evolve

from enginehouse.contract.engine import Engine, EngineStream, Placement, placement_of
from enginehouse.contract.errors import EngineDead, EnginehouseError, PluginFailed
from enginehouse.contract.types import EngineRequest, Event
from enginehouse.plugins import Guard, guarded, plain
from enginehouse.plugins.plugin_loops import PluginLoop, PluginLoops
from enginehouse.plugins.results import Expectation

_T = TypeVar("_T")

_BATCH = Expectation(Sequence[Event])
_EVENTS = frozenset(get_args(Event))
_STREAM, _END = "its stream", object()


def guarded_engine(engine: Engine, guard: Guard) -> tuple[Engine, asyncio.Future[EngineDead]]:
    """Return an opened engine with the guard around it, and the future of its death. Called on the event loop.

    Our own engines run on this loop, others on a loop of their own.

    Args:
        engine: the engine that a backend has opened.
        guard: the guard of the backend.
    """
    died: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
    inner = guarded(engine, Engine, guard)
    if guard.loops is None:
        return inner, died
    foreign = ForeignEngine(inner, evolve(guard, loops=PluginLoops(guard, max_loops=1)), died)
    return guarded(cast(Engine, foreign), Engine, guard), died


class ForeignEngine:
    """The methods of a guarded engine, those of optional interfaces included, run on a loop that belongs to it.

    Used on the event loop. Further attributes are the engine's.

    Args:
        engine: the guarded engine.
        guard: its guard, whose ``loops`` are this engine's alone.
        died: gets the reason if the loop is given up.
    """

    def __init__(self, engine: Engine, guard: Guard, died: asyncio.Future[EngineDead]) -> None:
        assert guard.loops is not None
        self.info = engine.info
        self._engine = engine
        self._guard = guard
        self._died = died
        self._loop = guard.loops.choose("open")
        self._loop.failure.add_done_callback(self._note_death)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._engine, name)
        if not inspect.iscoroutinefunction(member):
            return member
        return functools.wraps(member)(lambda *arguments: self._run(name, lambda: member(*arguments)))

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Submit a request; its events are read from the loop as well."""
        stream = await self._run("submit", lambda: self._engine.submit(request))
        return ForeignStream(stream, self._guard, self._loop)

    async def close(self) -> None:
        """Close the engine and end its loop; one that was given up cannot be closed."""
        if self._loop.failure.done():
            return
        try:
            await self._run("close", self._engine.close)
        finally:
            self._loop.failure.remove_done_callback(self._note_death)
            if not self._loop.failure.done():
                self._loop.failure.set_result(EngineDead("The engine was closed."))
            self._loop.end()

    async def _run(self, place: str, start: Callable[[], Awaitable[_T]]) -> _T:
        return await self._guard.run_async(place, start, self._loop)

    def _note_death(self, failure: asyncio.Future[EnginehouseError]) -> None:
        if not self._died.done():
            self._died.set_result(EngineDead(failure.result().message))


class ForeignStream:
    """The events of a request to a :class:`ForeignEngine`; implements :class:`EngineStream`."""

    def __init__(self, stream: EngineStream, guard: Guard, loop: PluginLoop) -> None:
        self._stream = stream
        self._guard = guard
        self._loop = loop

    @property
    def num_prompt_tokens(self) -> int:
        """See the contract."""
        return self._stream.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """See the contract."""
        return self._stream.prompt_token_ids

    @property
    def num_waiting_events(self) -> int:
        """See the contract."""
        return self._stream.num_waiting_events

    @property
    def placement(self) -> Placement | None:
        """See the contract."""
        return placement_of(self._stream)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over batches of events, each of which the engine produces on its loop."""
        batches: AsyncIterator[Sequence[Event]] | None = None

        async def read() -> Any:
            nonlocal batches
            batches = aiter(self._stream) if batches is None else batches
            return await anext(batches, _END)

        while (batch := await self._guard.run_async(_STREAM, read, self._loop)) is not _END:
            self._check(batch)
            yield batch

    def cancel(self) -> None:
        """Stop generating; does not wait for the engine."""
        if not self._loop.is_over.is_set():
            self._loop.loop.call_soon_threadsafe(self._cancel_there)

    def _cancel_there(self) -> None:
        with contextlib.suppress(PluginFailed):
            self._guard.call("cancel", self._stream.cancel)

    def _check(self, batch: Any) -> None:
        """Check what the engine gives; types first, as describing what is wrong costs 30 times more.

        Raises:
            PluginFailed: something else than events.
        """
        is_right = type(batch) in (list, tuple) and _EVENTS.issuperset(map(type, batch))
        if not is_right and (found := _BATCH.check(batch)):
            raise self._guard.mistake(_STREAM, found, type(plain(self._stream)).__aiter__)
