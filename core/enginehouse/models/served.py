"""One served model through its life: loading, ready, restarting, failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from attrs import define, field, frozen

from enginehouse.backend import Engine
from enginehouse.config import ModelSettings, Settings
from enginehouse.errors import EngineDead, EnginehouseError, ModelLoadError, ModelNotReady
from enginehouse.models.opening import ModelPlan, open_engine
from enginehouse.models.restarts import Restarts
from enginehouse.types import ModelInfo

__all__ = ["LoadedModel", "ModelCheck", "ModelState", "ModelStatus", "OnProgress", "ServedModel"]

ModelState = Literal["loading", "ready", "restarting", "failed"]

ModelCheck = Callable[[str, ModelInfo], Awaitable[None]]
"""Called with a model's name and what is known of it, once it is open and before it is served; raises to refuse it."""

OnProgress = Callable[[str, float, str], None]
"""Called on the event loop with a model's name, the share that is loaded (0 to 1), and what is being done.

The last call of a load says ``ready`` or ``failed``.
"""

_log = logging.getLogger(__name__)


@frozen(eq=False)
class LoadedModel:
    """A model that serves requests now. Do not keep it between requests: after a restart it is another one."""

    name: str
    settings: ModelSettings
    info: ModelInfo
    engine: Engine
    created: int


@frozen(kw_only=True)
class ModelStatus:
    """What is known about one model now.

    Attributes:
        created: Unix time in seconds when this server began to serve the model.
        info: of the last successful load; None before it.
        error: why the model failed, or why it is being restarted.
        progress: share of the current load, 0 to 1; 1 when ready.
        progress_text: what the current load is doing.
        backend: name of the chosen backend; None before the choice.
        reason: why this backend was chosen.
        num_restarts: how often its worker died and was started again.
    """

    name: str
    state: ModelState
    aliases: tuple[str, ...]
    created: int
    info: ModelInfo | None = None
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    backend: str | None = None
    reason: str = ""
    num_restarts: int = 0


@define(eq=False, kw_only=True)
class ServedModel:
    """State of one model; changed on the event loop only, by the one task that runs :meth:`serve`."""

    name: str
    settings: ModelSettings
    on_progress: OnProgress | None = None
    check: ModelCheck | None = None
    restarts: Restarts = field(factory=Restarts)
    state: ModelState = "loading"
    plan: ModelPlan | None = None
    created: int = field(factory=lambda: int(time.time()))
    loaded: LoadedModel | None = None
    error: str | None = None
    progress: float = 0.0
    progress_text: str = ""
    _info: ModelInfo | None = None
    _load_s: float = 1.0
    # Set while the state is ready or failed, so that requests can wait for the outcome of a restart.
    _settled: asyncio.Event = field(factory=asyncio.Event)

    def get(self) -> LoadedModel:
        """The loaded model.

        Raises:
            ModelNotReady: it is loading or restarting.
            ModelLoadError: it failed for good.
        """
        if self.loaded is not None:
            return self.loaded
        if self.state == "failed":
            raise ModelLoadError(f"The model {self.name!r} could not be loaded: {self.error}")
        done = f" ({self.progress:.0%})" if self.state == "loading" and self.progress else ""
        raise ModelNotReady(
            f"The model {self.name!r} is {self.state}{done}; try again in a moment.",
            retry_after_s=max(1.0, self._load_s * (1 - self.progress)),
        )

    async def wait(self, timeout_s: float) -> LoadedModel:
        """Like :meth:`get`, but first waits up to ``timeout_s`` for a load to end."""
        if self.loaded is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
        return self.get()

    def status(self) -> ModelStatus:
        """What is known now."""
        return ModelStatus(
            name=self.name,
            state=self.state,
            aliases=self.settings.aliases,
            created=self.created,
            info=self._info,
            error=self.error,
            progress=self.progress,
            progress_text=self.progress_text,
            backend=self.plan.backend.name if self.plan else None,
            reason=self.plan.reason if self.plan else "",
            num_restarts=self.restarts.total,
        )

    async def settled(self) -> None:
        """Wait until the model is ready or failed."""
        await self._settled.wait()

    async def serve(self, settings: Settings) -> None:
        """Open the model and keep it open: returns when it failed for good; cancel it to close the model."""
        try:
            while True:
                death, ready_s = await self._serve_once(settings)
                delay_s = self.restarts.died(ready_s)
                if delay_s is None:
                    num_starts = self.restarts.num_failed_starts
                    raise ModelLoadError(f"given up after {num_starts} failed starts; the last one: {death}")
                self._become("restarting", death)
                _log.warning("model %s: %s; restarting in %.1f s", self.name, death, delay_s)
                await asyncio.sleep(delay_s)
        except EnginehouseError as error:
            self.fail(error.message)
        except Exception as error:  # noqa: BLE001 - border to the backend: never stay "loading" for ever
            _log.exception("opening the model %s failed", self.name)
            self.fail(f"{type(error).__name__}: {error}")

    async def _serve_once(self, settings: Settings) -> tuple[str, float | None]:
        """Open the engine and wait until it dies.

        Returns:
            Why it died and for how many seconds it was ready; None when it never was.

        Raises:
            EnginehouseError: the very first load was refused: what a backend refuses once it refuses again.
        """
        assert self.plan is not None
        began = time.monotonic()
        try:
            opened = await open_engine(self.plan, self.settings, settings, self._report)
        except EngineDead as error:
            return error.message, None
        except EnginehouseError as error:
            if self._info is None:
                raise
            return error.message, None
        self._load_s = time.monotonic() - began
        try:
            if self.check is not None:
                await self.check(self.name, opened.engine.info)
        except BaseException:
            await opened.engine.close()
            raise
        self._become_ready(opened.engine)
        began = time.monotonic()
        death = "the server is shutting down"
        try:
            death = (await opened.died).message
        finally:
            ready_s = time.monotonic() - began
            self.loaded = None
            self._become("restarting", death)
            await opened.engine.close()
        return death, ready_s

    def fail(self, error: str) -> None:
        """Give the model up."""
        _log.error("model %s failed: %s", self.name, error)
        self._become("failed", error)

    def _become_ready(self, engine: Engine) -> None:
        self._info = engine.info
        self.loaded = LoadedModel(self.name, self.settings, engine.info, engine, self.created)
        self._become("ready", None)

    def _become(self, state: ModelState, error: str | None) -> None:
        self.state, self.error = state, error
        self.progress, self.progress_text = (1.0, "") if state == "ready" else (0.0, "")
        if state in ("ready", "failed"):
            self._settled.set()
            if self.on_progress is not None:
                self.on_progress(self.name, 1.0, state)
        else:
            self._settled.clear()

    def _report(self, share: float, text: str) -> None:
        """Note a load's progress. Late reports of a load that has ended are dropped."""
        if self.state in ("ready", "failed"):
            return
        self.progress, self.progress_text = share, text
        if self.on_progress is not None:
            self.on_progress(self.name, share, text)
