"""Model manager: the table of served models by name, their states, and leases for requests.

The pipeline requests models by name, the API reads the states of all. Commands of the operator and new
configurations, in ``changing``, use the table in this module.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary, WeakSet

from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import (
    ConfigError,
    EnginehouseError,
    ModelNotFound,
    ModelTooLarge,
    ServerStopping,
)
from enginehouse.contract.inspection import EngineMetrics, Inspectable
from enginehouse.contract.model_hub import ModelHub
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.serving.leases import Lease
from enginehouse.serving.lifecycle import Events, ModelEvent, ModelStatus
from enginehouse.serving.memory import Reservations, default_budget, footprint_in_thread
from enginehouse.serving.opening import PLAN_TIMEOUT_S, plan_in_thread
from enginehouse.serving.restarts import RestartPolicy, Restarts
from enginehouse.serving.served import LoadedModel, ModelCheck, ServedModel
from enginehouse.serving.sources import download, missing_download
from enginehouse.settings.config import ModelSettings, Settings, matches
from enginehouse.settings.limits import MemoryBudget
from enginehouse.workers.request_queue import RequestQueue

OnProgress = Callable[[str, float, str], None]
"""Called on the event loop with a model's name, the loaded share (0 to 1), and the current activity.

The text of the last call for a load is ``ready``, for a pooling model ``ready for`` its task, or ``failed`` or
``unloaded``.
"""

_log = logging.getLogger(__name__)

# Maximum time that a request waits for a model that is being restarted before it is refused with Retry-After.
_RESTART_WAIT_S = 30.0


class ModelManager:
    """Owns the served models. All methods are called on one event loop.

    Attributes:
        settings: the current settings.
        events: events of the models.
        room: memory budget and its reservations.
        former_engines: sums of the counters of the engines that have died or are unloaded, by model.
    """

    def __init__(
        self,
        settings: Settings,
        registry: PluginRegistry,
        on_progress: OnProgress | None = None,
        restart_policy: RestartPolicy | None = None,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.events = Events[ModelEvent]()
        self.room = Reservations(budget_of(settings), settings.limits.drain_s)
        self.former_engines: dict[str, EngineMetrics] = {}
        self._on_progress = on_progress
        self._restart_policy = restart_policy or RestartPolicy()
        self._check: ModelCheck | None = None
        self._models: dict[str, ServedModel] = {}
        self._by_name: dict[str, ServedModel] = {}
        self._instances = itertools.count(1)
        self._made: WeakSet[ServedModel] = WeakSet()  # includes models that are not served yet, or no longer
        self._downloads: WeakKeyDictionary[ServedModel, asyncio.Task[None]] = WeakKeyDictionary()
        self._background: set[asyncio.Task[None]] = set()
        self._is_planned = asyncio.Event()
        self._is_closed = False
        self.put({name: self.make(name, model) for name, model in settings.models.items()})

    # -- model table -------------------------------------------------------------------------------

    @property
    def models(self) -> dict[str, ServedModel]:
        """The served models by name, in the order of the settings; a copy."""
        return dict(self._models)

    def put(self, models: dict[str, ServedModel]) -> None:
        """Serve exactly these models from now on."""
        self._models = models
        self._by_name = {known: model for model in models.values() for known in (model.name, *model.settings.aliases)}

    def make(self, name: str, settings: ModelSettings) -> ServedModel:
        """Create a model that is not served yet."""
        model = ServedModel(
            name=name,
            settings=settings,
            instance=next(self._instances),
            room=self.room,
            request_queue=RequestQueue(settings.slots, self.settings.limits),
            publish=self.publish,
            on_wanted=self._on_wanted,
            on_engine_end=self._on_engine_end,
            check=self._check,
            restarts=Restarts(self._restart_policy),
        )
        self._made.add(model)
        return model

    def check_with(self, check: ModelCheck) -> None:
        """Set the check that may refuse models opened from now on."""
        self._check = check
        for model in self._models.values():
            model.check = check

    def publish(self, event: ModelEvent) -> None:
        """Pass an event to all listeners."""
        self.events.publish(event)
        if self._on_progress is None:
            return
        if event.kind in ("ready", "restarted"):
            model = self._models.get(event.model)
            info = None if model is None else model.status().info
            task = "generate" if info is None else info.task
            self._on_progress(event.model, 1.0, "ready" if task == "generate" else f"ready for {task}")
        elif event.kind in ("failed", "unloaded"):
            self._on_progress(event.model, 1.0, event.kind)
        elif (
            event.kind in ("loading", "downloading") and event.text != "ready"
        ):  # a backend's last stage; checks of the model follow
            self._on_progress(event.model, event.progress, event.text)

    # -- lifecycle ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to load every eager model that fits into the memory; returns before they are ready.

        Raises:
            ConfigError: a model has an option that its backend does not know, or with an invalid value.
        """
        models = list(self._models.values())
        for model in models:
            server = self.settings.server
            hub = await self.find_download(model.settings.source) if server.pull or server.pull_on_request else None
            if hub is not None and server.pull:
                self.begin_download(model, hub)
            elif hub is not None:
                model.postpone()  # the first request for it begins the download
            else:
                await self._plan(model)
        self._is_planned.set()
        await self.begin_eager([model for model in models if model.plan is not None])

    async def find_download(self, source: str) -> ModelHub | None:
        """Return the hub of a source whose files are missing; planning reports a hub that fails or hangs."""
        try:
            async with asyncio.timeout(PLAN_TIMEOUT_S):
                return await run_in_daemon_thread(f"files of {source}", lambda: missing_download(source, self.registry))
        except (EnginehouseError, TimeoutError):
            return None

    async def _plan(self, model: ServedModel) -> None:
        try:
            model.plan = await plan_in_thread(model.name, model.settings, self.registry)
        except ConfigError:
            raise
        except EnginehouseError as error:
            model.fail(error.message)

    async def _download(self, model: ServedModel, hub: ModelHub) -> None:
        """Download a model's files, then continue with it as with the others."""

        def report(share: float, text: str) -> None:
            if model in self._downloads:
                model.report_download(share, text)

        with model.failing("downloading"):
            try:
                await download(hub, model.settings.source, report)
                await self._plan(model)
            finally:
                self._downloads.pop(model, None)
        await self._begin_planned(model)

    async def plan_downloaded(self, model: ServedModel) -> None:
        """Continue with a failed model whose files have arrived, as with the others."""
        model.report_download(1.0, "its files are here")
        with model.failing("planning"):
            await self._plan(model)
        await self._begin_planned(model)

    async def _begin_planned(self, model: ServedModel) -> None:
        if model.plan is None:
            return
        if model.settings.load == "lazy":
            model.postpone()
        else:
            await self.begin_eager([model])

    def begin_download(self, model: ServedModel, hub: ModelHub) -> None:
        """Begin to download the files of a model; it is planned afterwards."""
        self._downloads[model] = asyncio.create_task(self._download(model, hub))
        self.run(self._downloads[model])

    def is_downloading(self, model: ServedModel) -> bool:
        """True while the files of a model are being downloaded."""
        return model in self._downloads

    async def download_on_demand(self, model: ServedModel) -> bool:
        """Begin to download the files of a model that is not loaded, or join that; False if none are missing.

        Requests for the model wait for it as they wait for a load. Afterwards it is loaded if requests wait for it.
        """
        if not self.is_downloading(model):
            hub = await self.find_download(model.settings.source)
            if hub is None:
                return False
            self.check_open()
            if not (self.is_downloading(model) or model.is_serving or model.is_closed):
                model.on_demand = True
                model.report_download(0.0, "waiting for the hub")
                self.begin_download(model, hub)
        return True

    def stop_download(self, model: ServedModel) -> bool:
        """Stop the download of a model; files that have arrived are kept. Returns False if there is none."""
        task = self._downloads.pop(model, None)
        if task is not None:
            task.cancel()
        return task is not None

    async def begin_eager(self, models: Sequence[ServedModel]) -> None:
        """Begin to load the eager models; pinned ones reserve their memory first."""
        eager = [model for model in models if model.settings.load == "eager"]
        for model in sorted(eager, key=lambda model: not model.is_pinned):
            assert model.plan is not None
            footprint = await footprint_in_thread(model.plan)
            if model.is_closed:
                continue  # a new configuration has meanwhile removed it
            try:
                fits = self.room.claim(model, footprint)
            except ModelTooLarge as error:
                model.fail(error.message)
                continue
            if fits:
                model.begin(self.settings, on_demand=False)
            elif not model.is_serving:
                _log.info("model %s does not fit beside the others; it loads with its first request", model.name)
                model.postpone()

    def run(self, task: asyncio.Task[None]) -> None:
        """Track a task until it is done; closing cancels it, and cancels tasks that are added later at once."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        if self._is_closed:
            task.cancel()

    def check_open(self) -> None:
        """Raise ServerStopping if this is closed or being closed: nothing new may be served then."""
        if self._is_closed:
            raise ServerStopping("The server is shutting down.")

    async def close(self) -> None:
        """Close every model; running requests end with EngineDead."""
        self._is_closed = True
        while tasks := tuple(self._background):  # the end of a task may have started another one
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(model.close() for model in tuple(self._made)))

    # -- requests ----------------------------------------------------------------------------------

    def get(self, name: str | None) -> LoadedModel:
        """Return the model with that name or alias, if it is loaded; None means the first configured one.

        Raises:
            ModelNotFound: no model has that name.
            ModelNotReady: it is not loaded now.
            ModelLoadError: it failed.
        """
        return self.find(name).get()

    async def lease(self, name: str | None) -> Lease[LoadedModel]:
        """Return a lease of the model with that name or alias, loaded if necessary; release the lease after use.

        Waits for a load caused by requests, and for a restart, but not for the first load of a server: that may take
        minutes, and clients see its state at ``/health``.

        Raises:
            ModelNotFound: no model has that name.
            ModelNotReady: it takes too long.
            ModelOverloaded: the limit of requests that may wait for the load is reached.
            EngineError: it cannot be loaded, or failed earlier.
        """
        model = self.find(name)
        model.check_room()
        if model.state == "unloaded":
            await self._is_planned.wait()
            model = self.find(name)  # a new configuration may have been applied meanwhile
            if model.plan is not None:
                model.begin(self.settings, on_demand=True)
            elif self.settings.server.pull_on_request:
                await self.download_on_demand(model)
        if model.state == "restarting":
            return await model.lease(_RESTART_WAIT_S)
        return await model.lease(self.settings.limits.load_wait_s if model.on_demand or model.is_leaving else 0.0)

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """Lease the model for the duration of the block, see :meth:`lease`."""
        lease = await self.lease(name)
        try:
            with lease.explaining():
                yield lease.model
        finally:
            lease.release()

    async def wait(self, name: str | None) -> LoadedModel:
        """Return the model as :meth:`lease` finds it, for inspection only: it may be unloaded at any time."""
        async with self.use(name) as model:
            return model

    def find(self, name: str | None) -> ServedModel:
        """Return the model with that name or alias, in any state; ``x:name`` is x if it has an adapter of that name.

        Raises:
            ModelNotFound: no model has that name.
            AdapterNotFound: it has adapters, but none of that name.
        """
        if name is None and self._models:
            return next(iter(self._models.values()))
        model = self._by_name.get(name or "")
        if model is not None:
            return model
        based, adapter = self._with_adapter(name or "")
        if based is not None and adapter in based.adapters.names:
            return based
        model = self._by_pattern(name or "")
        if model is not None:
            return model
        if based is not None and based.adapters.names:
            raise based.adapters.not_found(based.name, adapter)
        raise ModelNotFound(name or "")

    def adapter_in(self, name: str | None) -> str | None:
        """Return the adapter that a name such as ``x:name`` gives; None if it is a model's own name or alias."""
        based, adapter = self._with_adapter(name or "")
        return adapter if based is not None and adapter in based.adapters.names else None

    def _with_adapter(self, name: str) -> tuple[ServedModel | None, str]:
        """Return the model before the last colon of a name that is not a model's own, and the text after it."""
        base, colon, adapter = name.rpartition(":")
        return (self._by_name.get(base) if colon and name not in self._by_name else None), adapter

    def _by_pattern(self, name: str) -> ServedModel | None:
        """Return the first model with an alias that is a pattern of that name."""
        named = (model for alias, model in self._by_name.items() if matches(alias, name))
        return next(named, None)

    def _on_engine_end(self, model: str, engine: Engine) -> None:
        if isinstance(engine, Inspectable):
            former = self.former_engines.get(model)
            self.former_engines[model] = engine.metrics if former is None else former + engine.metrics

    def _on_wanted(self, model: ServedModel) -> None:
        """Handle requests that wait for a model that is not loaded: load it, or its replacement."""
        current = self._models.get(model.name)
        if current is None:
            model.refuse_waiters(ModelNotFound(model.name))
            return
        if current is not model:
            model.reassign_waiters(current)
        current.begin(self.settings, on_demand=True)

    # -- status ------------------------------------------------------------------------------------

    async def wait_settled(self, timeout_s: float) -> None:
        """Wait until no model is loading or restarting, at most ``timeout_s``."""
        waits = [asyncio.create_task(model.settled()) for model in self._models.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the status of every model, in the order of the settings."""
        return [model.status() for model in self._models.values()]


def budget_of(settings: Settings) -> MemoryBudget:
    """Return the memory budget of the settings, with defaults for the devices that they do not name."""
    given = settings.limits.memory_budget
    by_device = default_budget().by_device
    return MemoryBudget({**by_device, **given.by_device} if given is not None else by_device)
