"""A backend whose models open at once, need as much memory as their settings say, and talk for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

from attrs import define, evolve, field, frozen

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.types import EngineRequest, Segment
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Generation
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.serving.changing import ModelChanger
from enginehouse.serving.leases import Lease
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse.settings.limits import MAIN_MEMORY, MemoryBudget
from enginehouse_testkit.script import Script, ScriptToken
from enginehouse_testkit.scripted import ScriptedEngine


@frozen(kw_only=True)
class TinyOptions:
    """``gate`` names an event of the backend that opening waits for."""

    context: int | None = None
    slots: int = 8
    size: int = 1
    device: str = "cpu"
    gate: str = ""
    fails: str = ""


@define(eq=False)
class TinyBackend:
    """Counts what is open: ``open_bytes`` now, ``most_bytes`` ever, and how often each source was opened."""

    name = "tiny"
    api_version = API_VERSION
    options: type[Any] = TinyOptions
    opens: Literal["model", "engine"] = "engine"
    open_bytes: int = 0
    most_bytes: int = 0
    num_opened: dict[str, int] = field(factory=dict)
    gates: dict[str, threading.Event] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def probe(self) -> Probe:
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        return Match(1.0, "everything is tiny")

    def estimate(self, source: ModelSource, options: TinyOptions) -> MemoryEstimate:
        return MemoryEstimate(options.size, 0, options.size)

    def open(self, source: ModelSource, options: TinyOptions, progress: Progress) -> ScriptedEngine:
        progress(0.5, "growing")
        if options.gate:
            assert self.gates[options.gate].wait(60)
        if options.fails:
            raise ModelLoadError(options.fails)
        with self._lock:
            self.num_opened[source.text] = self.num_opened.get(source.text, 0) + 1
            self.open_bytes += options.size
            self.most_bytes = max(self.most_bytes, self.open_bytes)
        return _TinyEngine(self, options)

    def closed(self, size: int) -> None:
        with self._lock:
            self.open_bytes -= size


class _TinyEngine(ScriptedEngine):
    def __init__(self, backend: TinyBackend, options: TinyOptions) -> None:
        super().__init__(Script(tokens=(ScriptToken(text=" tick"), ScriptToken(delay_s=0.002)), loop=True))
        self._backend: TinyBackend | None = backend
        self._size = options.size

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(0)  # a worker's end takes time, too
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.closed(self._size)


def tiny(size: int = 1, **fields: Any) -> ModelSettings:
    """A model that needs ``size`` bytes; fields of the options may be given, too."""
    options = {name: fields.pop(name) for name in ("device", "gate", "fails") if name in fields}
    fields = {"source": "tiny", "load": "lazy", **fields}
    return ModelSettings(backend="tiny", options={"size": size, **options}, **fields)


def settings_of(models: Mapping[str, ModelSettings], budget: int | None = None, **limits: Any) -> Settings:
    """Settings with a budget for main memory; every model is its own source."""
    models = {name: evolve(model, source=name) if model.source == "tiny" else model for name, model in models.items()}
    given = MemoryBudget({MAIN_MEMORY: budget}) if budget is not None else None
    return Settings(models=models, limits=LimitsSettings(memory_budget=given, **limits))


@cache
def _no_plugins() -> PluginRegistry:
    return PluginRegistry.load(PluginsSettings(allow=()))


def registry_of(backend: TinyBackend) -> PluginRegistry:
    """No plugin but this backend. It counts as our own: its engine runs on the event loop of the test."""
    return evolve(_no_plugins(), backends={"tiny": backend}, owners={("backends", "tiny"): "tiny"})


@contextlib.asynccontextmanager
async def open_tiny(settings: Settings, backend: TinyBackend | None = None) -> AsyncIterator[ModelManager]:
    """A manager that has started; models that load at once are there."""
    manager = ModelManager(settings, registry_of(backend or TinyBackend()))
    try:
        await manager.start()
        await manager.wait_settled(10)
        yield manager
    finally:
        await manager.close()


def states(manager: ModelManager) -> dict[str, str]:
    """State of each model by name."""
    return {status.name: status.state for status in manager.statuses()}


_ids = itertools.count()
_generations: WeakKeyDictionary[Lease[LoadedModel], Generation] = WeakKeyDictionary()


async def endless(manager: ModelManager, name: str) -> Lease[LoadedModel]:
    """A lease whose generation runs."""
    lease = await manager.lease(name)
    request = EngineRequest(request_id=f"r{next(_ids)}", segments=(Segment("go"),))
    generation = _generations[lease] = Generation(await lease.model.engine.submit(request))
    generation.keep(lease)
    return lease


async def read(lease: Lease[LoadedModel]) -> None:
    async for _ in _generations[lease]:
        pass


def all_events(next_event: Callable[[], object]) -> list:
    """Everything that has been published."""
    events = []
    while True:
        waiting = next_event()
        try:
            waiting.send(None)
        except StopIteration as done:
            events.append(done.value)
        else:
            waiting.close()
            return events


async def change(changer: ModelChanger, settings: Settings) -> None:
    changer.apply(await changer.plan(settings))
