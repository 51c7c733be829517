"""One served model: its worker, which is loaded, restarted and unloaded, and the requests that need it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from attrs import define, evolve, field, frozen

from enginehouse.contract.calls import ModelState
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import (
    EnginehouseError,
    InsufficientMemory,
    ModelLoadError,
    ModelNotReady,
    ModelTooLarge,
    ModelUnloaded,
    ServerStopping,
)
from enginehouse.contract.types import ModelInfo
from enginehouse.plugins import Contained
from enginehouse.serving.adapters import AdapterTable
from enginehouse.serving.leases import Lease, Uses, Waiters
from enginehouse.serving.lifecycle import Drain, Lifecycle, ModelStatus, Publish
from enginehouse.serving.memory import Reservations, footprint_in_thread
from enginehouse.serving.opening import ModelPlan, OpenEngine, open_engine
from enginehouse.serving.restarts import Restarts, Supervisor
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.workers.fleet import FleetEngine
from enginehouse.workers.request_queue import RequestQueue

ModelCheck = Callable[[str, ModelInfo], Awaitable[None]]
"""Called with a model's name and information after it is opened, before it is served; raises to refuse it."""

_log = logging.getLogger(__name__)


@frozen(eq=False)
class LoadedModel:
    """A model that can serve requests now. Do not keep it between requests: a restart replaces it.

    Attributes:
        served: the model itself, which persists across restarts.
    """

    name: str
    settings: ModelSettings
    info: ModelInfo
    engine: Engine
    created: int
    served: ServedModel


@define(eq=False, kw_only=True)
class ServedModel:
    """State of one model; modified only on the event loop. Implements :class:`enginehouse.serving.memory.Resident`.

    Attributes:
        settings: settings of the model; those that do not affect its worker may be replaced while it is loaded.
        instance: its number among all models that this server has had.
        room: memory budget in which it reserves its memory.
        request_queue: its queue.
        publish: called with every event of the model.
        on_wanted: called when it is not loaded although requests wait for it.
        on_engine_end: called with its name and an engine that has served it and has died or is unloaded.
        on_demand: True if its last load was started for a waiting caller, and not by the start of the server.
    """

    name: str
    settings: ModelSettings
    instance: int
    room: Reservations
    request_queue: RequestQueue
    publish: Publish = lambda _: None
    on_wanted: Callable[[ServedModel], None] = lambda _: None
    on_engine_end: Callable[[str, Engine], None] = lambda _, __: None
    check: ModelCheck | None = None
    restarts: Restarts = field(factory=Restarts)
    plan: ModelPlan | None = None
    created: int = field(factory=lambda: int(time.time()))
    loaded: LoadedModel | None = None
    on_demand: bool = False
    uses: Uses[LoadedModel] = field(factory=Uses)
    _adapters: AdapterTable = field(factory=AdapterTable)
    _lifecycle: Lifecycle = field(init=False)
    _info: ModelInfo | None = None
    _load_s: float = 1.0
    _serving: asyncio.Task[None] | None = None
    _stopped: asyncio.Task[None] | None = None  # the last task that was cancelled
    _drain: Drain[LoadedModel] = field(init=False)
    _waiters: Waiters[LoadedModel] = field(factory=Waiters)
    _expiry: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    def __attrs_post_init__(self) -> None:
        """Subscribe to the first begin and the last end of simultaneous uses."""
        self.uses.on_change = self._note_uses
        # The others will be loaded soon, and must not be requested before that.
        state: ModelState = "unloaded" if self.settings.load == "lazy" else "loading"
        self._lifecycle = Lifecycle(self.name, self.instance, self.publish, state)
        self._drain = Drain(
            lifecycle=self._lifecycle,
            uses=self.uses,
            waiters=self._waiters,
            end_worker=self._end_worker,
            on_end=self._go_on,
        )

    # -- status ------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """Current state of the model."""
        return self._lifecycle.state

    @property
    def is_pinned(self) -> bool:
        """True if it must not be evicted; a model that is being unloaded is never pinned."""
        return self.settings.pin and not self._drain.is_under_way

    @property
    def is_busy(self) -> bool:
        """True if requests use it or it is loading."""
        return self._drain.is_busy

    @property
    def last_used(self) -> float:
        """``time.monotonic()`` of its last use."""
        return self.uses.last_used

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for it to be loaded."""
        return len(self._waiters)

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until it is loaded, based on its last load."""
        return max(1.0, self._load_s * (1 - self._lifecycle.progress))

    @property
    def is_closed(self) -> bool:
        """True if it is no longer served; it is then never loaded again."""
        return self._is_closed

    @property
    def is_leaving(self) -> bool:
        """True if it is being unloaded."""
        return self._drain.is_under_way

    @property
    def is_serving(self) -> bool:
        """True if there is a worker, or will be soon."""
        return self._serving is not None

    def status(self) -> ModelStatus:
        """Return the current status."""
        footprint = self.room.footprint(self)
        return ModelStatus(
            name=self.name,
            instance=self.instance,
            state=self.state,
            aliases=self.settings.aliases,
            adapters=self.adapters.names,
            created=self.created,
            info=self._info,
            error=self._lifecycle.error,
            progress=self._lifecycle.progress,
            progress_text=self._lifecycle.progress_text,
            backend=self.plan.backend.name if self.plan else None,
            reason=self.plan.reason if self.plan else "",
            num_restarts=self.restarts.total,
            on_demand=self.on_demand,
            num_running=len(self.uses),
            num_waiting=self.num_waiting,
            idle_s=None if self.uses or self.loaded is None else time.monotonic() - self.last_used,
            memory_bytes=footprint.num_bytes if footprint is not None else None,
            device=footprint.device if footprint is not None else None,
            replicas=self._replicas(),
        )

    def _replicas(self) -> dict[str, int] | None:
        if self.loaded is None or not isinstance(self.loaded.engine, FleetEngine):
            return None
        return {place: worker.num_open for place, worker in self.loaded.engine.members.items()}

    async def settled(self) -> None:
        """Wait until the model is neither loading nor restarting, or is no longer served."""
        while not (self._lifecycle.is_settled or self._is_closed):
            await self._lifecycle.change()

    @property
    def adapters(self) -> AdapterTable:
        """The adapters that requests may name."""
        self._adapters.configured = tuple(self.settings.adapters)
        self._adapters.planned = self.plan.adapters if self.plan is not None else ()
        return self._adapters

    # -- requests ----------------------------------------------------------------------------------

    def get(self) -> LoadedModel:
        """Return the loaded model.

        Raises:
            ModelNotReady: it is not loaded now.
            ModelLoadError: it failed permanently.
        """
        if self.loaded is not None:
            return self.loaded
        raise self._refusal()

    async def restarted(self) -> LoadedModel:
        """Return the model for requests that lost their worker; waits for a restart without a time limit.

        Raises:
            ModelNotReady: it is not restarted, but unloaded.
            ModelUnloaded: it is no longer served.
            ModelLoadError: it could not be restarted.
        """
        while self._lifecycle.state == "restarting" and not self._is_closed:
            await self._lifecycle.change()
        return self.get()

    def check_room(self) -> None:
        """Refuse a further request if it would wait for a load without a place for it.

        Raises:
            ModelOverloaded: too many requests wait or run.
        """
        if self.loaded is None or self._drain.holds_back:
            why = f"{self.num_waiting} requests wait for the model {self.name!r} to be loaded; try again later."
            self.request_queue.check_waiters(self.num_waiting, why, self.retry_after_s)

    async def lease(self, timeout_s: float | None) -> Lease[LoadedModel]:
        """Return a lease for one request, after waiting up to ``timeout_s``; None waits without limit.

        Cancelling this does not stop a load.

        Raises:
            ModelNotReady: it took longer.
            EngineError: it could not be loaded.
        """
        if self.loaded is not None and not self._drain.holds_back:
            return self.uses.add(self.loaded)
        if self._lifecycle.state == "failed" or self._is_closed:
            raise self._refusal()
        lease = await self._waiters.wait(timeout_s)
        if lease is None:
            raise self._refusal()
        return lease

    def _refusal(self) -> EnginehouseError:
        if self._is_closed:
            return ModelUnloaded(f"The model {self.name!r} is not served any more.")
        if self._lifecycle.state == "failed":
            return ModelLoadError(f"The model {self.name!r} could not be loaded: {self._lifecycle.error}")
        done = (
            f" ({self._lifecycle.progress:.0%})"
            if self._lifecycle.state == "loading" and self._lifecycle.progress
            else ""
        )
        message = f"The model {self.name!r} is {self.state}{done}; try again in a moment."
        return ModelNotReady(message, retry_after_s=self.retry_after_s)

    # -- lifecycle ---------------------------------------------------------------------------------

    def begin(self, settings: Settings, *, on_demand: bool, after: asyncio.Future[None] | None = None) -> None:
        """Start to load; no effect if the model is loaded, loading, being unloaded or closed.

        Args:
            settings: the server's settings.
            on_demand: True if requests wait for it.
            after: awaited before loading; its result is ignored.
        """
        if self._serving is None and not self.is_leaving and not self._is_closed:
            self.on_demand = on_demand
            self._lifecycle.move("load")
            self._serving = asyncio.create_task(self._serve(settings, after), name=f"model {self.name}")

    async def _serve(self, settings: Settings, after: asyncio.Future[None] | None) -> None:
        """Open the model and keep it open: returns when it has failed permanently; cancel this to close the model."""
        try:
            with self.failing("opening"):
                if after is not None:
                    await asyncio.wait([after])
                if not await self._take_room():
                    return
                await Supervisor(
                    lifecycle=self._lifecycle,
                    restarts=self.restarts,
                    open=lambda: self._open(settings),
                    on_ready=self._become_ready,
                    on_gone=self._lose_engine,
                    finds_culprits=lambda: self.settings.replay,
                ).run()
        finally:
            self.room.free(self)
            self._serving = None

    def failing(self, what: str) -> Contained:
        """Guard of loading: any error in the block fails the model, which must not stay in the state "loading"."""
        return Contained(lambda error: self.fail(error.message), f"{what} the model {self.name} failed")

    async def _take_room(self) -> bool:
        """Reserve memory; False if there is none, so that the next request tries again."""
        assert self.plan is not None
        if self.room.footprint(self) is None:
            self._lifecycle.report(0.0, "waiting for memory")
            try:
                await self.room.take(self, await footprint_in_thread(self.plan))
            except (InsufficientMemory, ModelTooLarge) as error:
                _log.warning("%s", error.message)
                self._lifecycle.move("postponed", error.message)
                self._waiters.refuse(error)
                return False
        return True

    async def _open(self, settings: Settings) -> OpenEngine:
        """Open the next engine, and check it."""
        assert self.plan is not None
        began = time.monotonic()
        opened = await open_engine(self.plan, self.settings, settings, self._lifecycle.report, self.request_queue)
        self._load_s = time.monotonic() - began
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(opened.engine.close)
            if self.check is not None:
                await self.check(self.name, opened.engine.info)
            undo.pop_all()
        return opened

    def report_download(self, share: float, text: str) -> None:
        """Report the progress of downloading its files, before it can be loaded."""
        if self._lifecycle.state in ("unloaded", "failed"):
            self._lifecycle.move("load")
        self._lifecycle.report(share, text, "downloading")

    def postpone(self) -> None:
        """Postpone loading until the first request, which may already be waiting."""
        self._lifecycle.move("postponed")
        self.forward_waiters()

    def use_settings(self, settings: ModelSettings) -> None:
        """Replace settings that do not affect the worker."""
        self.settings = settings
        if self.loaded is not None:
            self.loaded = evolve(self.loaded, settings=settings)
        self._note_uses()

    def forward_waiters(self) -> None:
        """Let the manager handle waiting requests, if there are any."""
        if self._waiters:
            self.on_wanted(self)

    def reassign_waiters(self, successor: ServedModel) -> None:
        """Move the requests that wait for this model to another one."""
        self._waiters.move_to(successor._waiters)

    def refuse_waiters(self, error: EnginehouseError) -> None:
        """Fail the requests that wait for this model with ``error``."""
        self._waiters.refuse(error)

    def note(self, error: str) -> None:
        """Show an error without changing the state."""
        self._lifecycle.error = error

    def fail(self, error: str) -> None:
        """Set the state to failed and refuse waiting requests."""
        _log.error("model %s failed: %s", self.name, error)
        self._lifecycle.move("failed", error)
        self._waiters.refuse(self._refusal())

    def _lose_engine(self) -> None:
        if self.loaded is not None:
            self.on_engine_end(self.name, self.loaded.engine)
        self.loaded = None

    def _become_ready(self, engine: Engine) -> None:
        self._info = engine.info
        self.loaded = LoadedModel(self.name, self.settings, engine.info, engine, self.created, self)
        self._lifecycle.move("opened")
        # Also when it is to be unloaded by now: a load serves all requests that waited for it.
        self._waiters.answer(self.uses, self.loaded)
        self._note_uses()

    # -- unloading ---------------------------------------------------------------------------------

    async def evict(self, drain_s: float) -> bool:
        """Unload for another model, with the ``draining`` setting; see :class:`enginehouse.serving.memory.Resident`."""
        return await self.unload(drain_s, holds_back=self.settings.draining == "wait")

    async def unload(self, drain_s: float, *, force: bool = False, holds_back: bool = True) -> bool:
        """End the worker after the end of a load and of running requests; concurrent callers share one unload.

        Args:
            drain_s: seconds that a load and running requests get.
            force: end those that still run after that with an error; otherwise the model then stays loaded.
            holds_back: let new requests wait until the model is loaded again.

        Returns:
            True if it is unloaded.
        """
        while not self._is_closed and self._serving is not None:
            drain = self._drain.begin(drain_s, force=force, holds_back=holds_back)
            await asyncio.wait([drain])
            # An unload that was already in progress may have given up, whereas ``force`` does not.
            if not drain.cancelled() and (drain.result() or not force):
                return drain.result()
        # Closed, possibly meanwhile: that also ends the worker, and its memory is free after that.
        if self._serving is not None:
            await asyncio.wait([self._serving])
        return True

    async def _end_worker(self) -> None:
        """End the engine, or its load; neither exists if a load has failed meanwhile."""
        if self._serving is not None:
            await self._stop_serving(self._serving)
            self._lifecycle.move("ended")

    async def _stop_serving(self, serving: asyncio.Task[None]) -> None:
        """Cancel the serving task, but only once: a second time would interrupt it while it closes the engine."""
        if self._stopped is not serving:
            self._stopped = serving
            serving.cancel()
        await asyncio.wait([serving])

    def _go_on(self) -> None:
        """Continue after an unload: load again if requests wait, or keep serving if requests did not finish in time."""
        if self._lifecycle.state == "unloaded":
            self.forward_waiters()
        elif self.loaded is not None and not self._is_closed:
            self._lifecycle.move("stayed", "its requests did not finish in time, so it stays")
            self._waiters.answer(self.uses, self.loaded)

    async def close(self) -> None:
        """End at once and permanently, as when the server stops; running requests end with EngineDead."""
        self._is_closed = True
        self._lifecycle.touch()
        await self._drain.cancel()
        if self._serving is not None:
            await self._stop_serving(self._serving)
        self._lifecycle.move("closed")
        self.room.free(self)
        if self._expiry is not None:
            self._expiry.cancel()
        self._waiters.refuse(ServerStopping("The server is shutting down."))

    def _note_uses(self) -> None:
        """Handle the begin or end of uses: an idle model is unloaded after its ``ttl``."""
        self._lifecycle.touch()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.settings.ttl is not None and not self.uses and self.loaded is not None:
            self._expiry = asyncio.get_running_loop().call_later(self.settings.ttl, self._expire)

    def _expire(self) -> None:
        if not self.uses and self._lifecycle.state == "ready":
            self._drain.begin(0.0)
