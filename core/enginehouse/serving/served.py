"""One served model through its life: unloaded, loading, ready, draining, restarting, failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from attrs import define, evolve, field, frozen

from enginehouse.contract.backend import Engine
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
from enginehouse.serving.leases import Lease, Uses, Waiters
from enginehouse.serving.memory import Room, footprint_apart
from enginehouse.serving.opening import ModelPlan, OpenEngine, open_engine
from enginehouse.serving.restarts import Restarts
from enginehouse.serving.status import Condition, ModelState, ModelStatus, Publish
from enginehouse.serving.unloading import Departure
from enginehouse.serving.workers import Workers
from enginehouse.settings.config import ModelSettings, Settings

__all__ = ["LoadedModel", "ModelCheck", "ServedModel"]

ModelCheck = Callable[[str, ModelInfo], Awaitable[None]]
"""Called with a model's name and what is known of it, once it is open and before it is served; raises to refuse it."""

_log = logging.getLogger(__name__)


@frozen(eq=False)
class LoadedModel:
    """A model that serves requests now. Do not keep it between requests: after a restart it is another one.

    Attributes:
        served: the model through all its lives.
    """

    name: str
    settings: ModelSettings
    info: ModelInfo
    engine: Engine
    created: int
    served: ServedModel


@define(eq=False, kw_only=True)
class ServedModel:
    """State of one model; changed on the event loop only. Also a :class:`enginehouse.serving.memory.Tenant`.

    Attributes:
        settings: the model's own; what does not concern its worker may be replaced while it is loaded.
        instance: its number among all models that this server has had.
        room: where it takes the memory that it needs.
        publish: told of everything that happens to it.
        on_wanted: called when it is not loaded although requests wait for it.
        on_demand: its last load was begun for somebody who waits, and not by the start of the server.
    """

    name: str
    settings: ModelSettings
    instance: int
    room: Room
    publish: Publish = lambda _: None
    on_wanted: Callable[[ServedModel], None] = lambda _: None
    check: ModelCheck | None = None
    restarts: Restarts = field(factory=Restarts)
    plan: ModelPlan | None = None
    created: int = field(factory=lambda: int(time.time()))
    loaded: LoadedModel | None = None
    on_demand: bool = False
    uses: Uses[LoadedModel] = field(factory=Uses)
    _condition: Condition = field(init=False)
    _info: ModelInfo | None = None
    _load_s: float = 1.0
    _serving: asyncio.Task[None] | None = None
    _stopped: asyncio.Task[None] | None = None  # the last one that was told to end
    _departure: Departure[LoadedModel] = field(init=False)
    _waiters: Waiters[LoadedModel] = field(factory=Waiters)
    _expiry: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    def __attrs_post_init__(self) -> None:
        """Hear of the first and the last of simultaneous requests."""
        self.uses.on_change = self._note_uses
        # The others will soon load, and are not to be asked for until then.
        phase: Literal["unloaded", "loading"] = "unloaded" if self.settings.load == "lazy" else "loading"
        self._condition = Condition(self.name, self.instance, self.publish, phase)
        self._departure = Departure(
            condition=self._condition,
            uses=self.uses,
            waiters=self._waiters,
            end_worker=self._end_worker,
            on_end=self._go_on,
        )

    # -- what is known -----------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """What the model is doing."""
        phase = self._condition.phase
        return "draining" if self._departure.is_under_way and phase == "ready" else phase

    @property
    def is_pinned(self) -> bool:
        """Whether it never makes way; one that is on its way out does."""
        return self.settings.pin and not self._departure.is_under_way

    @property
    def is_busy(self) -> bool:
        """Whether requests use it or it is loading."""
        return self._departure.is_busy

    @property
    def last_used(self) -> float:
        """``time.monotonic()`` of its last use."""
        return self.uses.last_used

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it to be loaded."""
        return len(self._waiters)

    @property
    def retry_after_s(self) -> float:
        """When it should be there, by what its last load took."""
        return max(1.0, self._load_s * (1 - self._condition.progress))

    @property
    def is_closed(self) -> bool:
        """Whether it is not served any more, whatever was about to load it."""
        return self._is_closed

    @property
    def is_leaving(self) -> bool:
        """Whether it is about to be unloaded."""
        return self._departure.is_under_way

    @property
    def is_serving(self) -> bool:
        """Whether there is, or soon will be, a worker."""
        return self._serving is not None

    def status(self) -> ModelStatus:
        """What is known now."""
        footprint = self.room.footprint(self)
        return ModelStatus(
            name=self.name,
            instance=self.instance,
            state=self.state,
            aliases=self.settings.aliases,
            created=self.created,
            info=self._info,
            error=self._condition.error,
            progress=self._condition.progress,
            progress_text=self._condition.progress_text,
            backend=self.plan.backend.name if self.plan else None,
            reason=self.plan.reason if self.plan else "",
            num_restarts=self.restarts.total,
            on_demand=self.on_demand,
            num_running=len(self.uses),
            num_waiting=self.num_waiting,
            idle_s=None if self.uses or self.loaded is None else time.monotonic() - self.last_used,
            memory_bytes=footprint.num_bytes if footprint is not None else None,
            device=footprint.device if footprint is not None else None,
        )

    async def settled(self) -> None:
        """Wait until the model neither loads nor restarts, or is not served any more."""
        while not (self._condition.is_settled or self._is_closed):
            await self._condition.change()

    # -- requests ----------------------------------------------------------------------------------

    def get(self) -> LoadedModel:
        """The loaded model.

        Raises:
            ModelNotReady: it is not loaded now.
            ModelLoadError: it failed for good.
        """
        if self.loaded is not None:
            return self.loaded
        raise self._refusal()

    async def restarted(self) -> LoadedModel:
        """The model for requests that it was answering when its worker died: waits for a restart, however long.

        Raises:
            ModelNotReady: it is not restarted, but unloaded.
            ModelUnloaded: it is not served any more.
            ModelLoadError: it could not be restarted.
        """
        while self._condition.phase == "restarting" and not self._is_closed:
            await self._condition.change()
        return self.get()

    async def lease(self, timeout_s: float | None) -> Lease[LoadedModel]:
        """The loaded model for one request, which waits for it up to ``timeout_s``; None is as long as it takes.

        Cancelling it stops no load.

        Raises:
            ModelNotReady: it took longer.
            EngineError: it could not be loaded.
        """
        if self.loaded is not None and not self._departure.holds_back:
            return self.uses.add(self.loaded)
        if self._condition.phase == "failed" or self._is_closed:
            raise self._refusal()
        lease = await self._waiters.wait(timeout_s)
        if lease is None:
            raise self._refusal()
        return lease

    def _refusal(self) -> EnginehouseError:
        if self._is_closed:
            return ModelUnloaded(f"The model {self.name!r} is not served any more.")
        if self._condition.phase == "failed":
            return ModelLoadError(f"The model {self.name!r} could not be loaded: {self._condition.error}")
        done = (
            f" ({self._condition.progress:.0%})"
            if self._condition.phase == "loading" and self._condition.progress
            else ""
        )
        message = f"The model {self.name!r} is {self.state}{done}; try again in a moment."
        return ModelNotReady(message, retry_after_s=self.retry_after_s)

    # -- life --------------------------------------------------------------------------------------

    def begin(self, settings: Settings, *, on_demand: bool, after: asyncio.Future[None] | None = None) -> None:
        """Start to load, once for all who ask; harmless when it is loaded, loads, is on its way out or closed.

        Args:
            settings: those of the server.
            on_demand: requests wait for it.
            after: waited for first, however it ends.
        """
        if self._serving is None and not self._is_closed:
            self.on_demand = on_demand
            self._condition.become("loading")
            self._serving = asyncio.create_task(self._serve(settings, after), name=f"model {self.name}")

    async def _serve(self, settings: Settings, after: asyncio.Future[None] | None) -> None:
        """Open the model and keep it open: returns when that failed for good; cancel it to close the model."""
        try:
            if after is not None:
                await asyncio.wait([after])
            await self._take_room()
            await Workers(
                condition=self._condition,
                restarts=self.restarts,
                open=lambda: self._open(settings),
                on_ready=self._become_ready,
                on_gone=self._lose_engine,
                finds_culprits=lambda: self.settings.replay,
            ).run()
        except (InsufficientMemory, ModelTooLarge) as error:
            _log.warning("%s", error.message)
            self._condition.become("unloaded", error.message)
            self._waiters.refuse(error)
        except EnginehouseError as error:
            self.fail(error.message)
        except Exception as error:  # noqa: BLE001 - border to the backend: never stay "loading" for ever
            _log.exception("opening the model %s failed", self.name)
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            self.room.free(self)
            self._serving = None

    async def _take_room(self) -> None:
        assert self.plan is not None
        if self.room.footprint(self) is None:
            self._condition.report(0.0, "waiting for memory")
            await self.room.take(self, await footprint_apart(self.plan))

    async def _open(self, settings: Settings) -> OpenEngine:
        """The next engine, which nothing speaks against."""
        assert self.plan is not None
        began = time.monotonic()
        opened = await open_engine(self.plan, self.settings, settings, self._condition.report)
        self._load_s = time.monotonic() - began
        try:
            if self.check is not None:
                await self.check(self.name, opened.engine.info)
        except BaseException:
            await opened.engine.close()
            raise
        return opened

    def report_download(self, share: float, text: str) -> None:
        """Note how much of its files is here, before it can be loaded."""
        if self._condition.phase == "unloaded":
            self._condition.become("loading")
        self._condition.report(share, text)

    def put_off(self) -> None:
        """Do not load now, but with the first request, which may wait already."""
        self._condition.become("unloaded")
        self.pass_on()

    def use_settings(self, settings: ModelSettings) -> None:
        """Take settings that do not concern the worker."""
        self.settings = settings
        if self.loaded is not None:
            self.loaded = evolve(self.loaded, settings=settings)
        self._note_uses()

    def pass_on(self) -> None:
        """Let the manager say what becomes of requests that wait, if there are any."""
        if self._waiters:
            self.on_wanted(self)

    def hand_over(self, successor: ServedModel) -> None:
        """Let requests that wait for this model wait for another one."""
        self._waiters.move_to(successor._waiters)

    def refuse_waiters(self, error: EnginehouseError) -> None:
        """Raise ``error`` where requests wait for this model."""
        self._waiters.refuse(error)

    def note(self, error: str) -> None:
        """Show an error that changes nothing else."""
        self._condition.error = error

    def fail(self, error: str) -> None:
        """Give the model up."""
        _log.error("model %s failed: %s", self.name, error)
        self._condition.become("failed", error)
        self._waiters.refuse(self._refusal())

    def _lose_engine(self) -> None:
        self.loaded = None

    def _become_ready(self, engine: Engine) -> None:
        self._info = engine.info
        self.loaded = LoadedModel(self.name, self.settings, engine.info, engine, self.created, self)
        self._condition.become("ready")
        # Also when it was asked to leave meanwhile: a load serves all who waited for it.
        self._waiters.answer(self.uses, self.loaded)
        self._note_uses()

    # -- the end -----------------------------------------------------------------------------------

    async def make_way(self, drain_s: float) -> bool:
        """Leave for another model, as the settings say, see :class:`enginehouse.serving.memory.Tenant`."""
        return await self.unload(drain_s, holds_back=self.settings.draining == "wait")

    async def unload(self, drain_s: float, *, force: bool = False, holds_back: bool = True) -> bool:
        """End the worker, when a load has ended and running requests have; all who wait for that share one end.

        Args:
            drain_s: seconds that these get.
            force: end what still runs after that with an error; otherwise it is then left as it was.
            holds_back: let new requests wait until the model is loaded again.

        Returns:
            Whether it is unloaded.
        """
        while not self._is_closed and self._serving is not None:
            departure = self._departure.begin(drain_s, force=force, holds_back=holds_back)
            await asyncio.wait([departure])
            # One that was under way already may have given up, where this one insists.
            if not departure.cancelled() and (departure.result() or not force):
                return departure.result()
        # Closed, perhaps meanwhile: that ends the worker as well, and whoever waits for its memory goes on then.
        if self._serving is not None:
            await asyncio.wait([self._serving])
        return True

    async def _end_worker(self) -> None:
        """End the engine, or its load; there is none when a load has failed meanwhile."""
        if self._serving is not None:
            self._condition.is_closing = True
            await self._stop_serving(self._serving)
            self._condition.become("unloaded")
            self._condition.is_closing = False

    async def _stop_serving(self, serving: asyncio.Task[None]) -> None:
        """Cancel the task that serves, once: a second time would interrupt it while it closes the engine."""
        if self._stopped is not serving:
            self._stopped = serving
            serving.cancel()
        await asyncio.wait([serving])

    def _go_on(self) -> None:
        """The model has left, perhaps to come back for those who wait; or it stays, as its requests did not finish."""
        if self._condition.phase == "unloaded":
            self.pass_on()
        elif self.loaded is not None and not self._condition.is_closing:
            self._condition.tell("ready", "its requests did not finish in time, so it stays")
            self._waiters.answer(self.uses, self.loaded)

    async def close(self) -> None:
        """End at once and for good, as with the server; running requests end with EngineDead."""
        self._is_closed = self._condition.is_closing = True
        self._condition.touch()
        await self._departure.cancel()
        if self._serving is not None:
            await self._stop_serving(self._serving)
        self.room.free(self)
        if self._expiry is not None:
            self._expiry.cancel()
        self._waiters.refuse(ServerStopping("The server is shutting down."))

    def _note_uses(self) -> None:
        """Something began or ended to use the model: an idle one is unloaded after its time."""
        self._condition.touch()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.settings.ttl is not None and not self.uses and self.loaded is not None:
            self._expiry = asyncio.get_running_loop().call_later(self.settings.ttl, self._expire)

    def _expire(self) -> None:
        if not self.uses and self._condition.phase == "ready":
            self._departure.begin(0.0)
