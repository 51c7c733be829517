"""Names to loaded models: loads all configured models in the background and says how each is doing.

The pipeline asks it for a model by name, the API for the state of all. A request never makes it open or
download anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from enginehouse.config import Settings
from enginehouse.errors import ConfigError, EnginehouseError, ModelNotFound
from enginehouse.models.opening import plan_model
from enginehouse.models.restarts import RestartPolicy, Restarts
from enginehouse.models.served import LoadedModel, ModelCheck, ModelStatus, OnProgress, ServedModel
from enginehouse.plugins import PluginRegistry

__all__ = ["ModelManager"]

_log = logging.getLogger(__name__)

# How long a request waits for a model that is being restarted before it is told to come back.
_RESTART_WAIT_S = 30.0


class ModelManager:
    """Owns the served models. All methods are called on one event loop."""

    def __init__(
        self,
        settings: Settings,
        registry: PluginRegistry,
        on_progress: OnProgress | None = None,
        restart_policy: RestartPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._models = {
            name: ServedModel(
                name=name,
                settings=model,
                on_progress=on_progress,
                restarts=Restarts(restart_policy or RestartPolicy()),
            )
            for name, model in settings.models.items()
        }
        self._by_name = {
            known: model for model in self._models.values() for known in (model.name, *model.settings.aliases)
        }
        self._tasks: list[asyncio.Task[None]] = []

    def check_with(self, check: ModelCheck) -> None:
        """Let ``check`` refuse models that were opened; call it before :meth:`start`."""
        for model in self._models.values():
            model.check = check

    async def start(self) -> None:
        """Begin to load every configured model; returns before they are ready.

        Raises:
            ConfigError: a model has an option that its backend does not know, or with a wrong value.
        """
        for model in self._models.values():
            try:
                model.plan = await asyncio.to_thread(plan_model, model.name, model.settings, self._registry)
            except ConfigError:
                raise
            except EnginehouseError as error:
                model.fail(error.message)
            except Exception as error:  # noqa: BLE001 - border to plugins: a broken one stops its own model only
                _log.error("planning the model %s failed", model.name, exc_info=error)
                model.fail(f"{type(error).__name__}: {error}")
        for model in self._models.values():
            if model.plan is not None:
                task = asyncio.create_task(model.serve(self._settings), name=f"model {model.name}")
                self._tasks.append(task)

    def get(self, name: str | None) -> LoadedModel:
        """The model of that name or alias; None is the first configured one.

        Raises:
            ModelNotFound: no model has that name.
            ModelNotReady: it is loading or restarting.
            ModelLoadError: it failed.
        """
        return self._find(name).get()

    async def wait(self, name: str | None, timeout_s: float = _RESTART_WAIT_S) -> LoadedModel:
        """Like :meth:`get`, but a model that is being restarted gets ``timeout_s`` to come back.

        The first load is not waited for: it may take minutes, and clients see its state at ``/health``.
        """
        model = self._find(name)
        return await model.wait(timeout_s) if model.state == "restarting" else model.get()

    async def wait_settled(self, timeout_s: float) -> None:
        """Wait until every model is ready or failed, at most ``timeout_s``."""
        waits = [asyncio.create_task(model.settled()) for model in self._models.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()

    def statuses(self) -> Sequence[ModelStatus]:
        """The state of every model, in the order of the settings."""
        return [model.status() for model in self._models.values()]

    async def close(self) -> None:
        """Close every model; running requests end with EngineDead."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _find(self, name: str | None) -> ServedModel:
        if name is None and self._models:
            return next(iter(self._models.values()))
        model = self._by_name.get(name or "")
        if model is None:
            raise ModelNotFound(name or "")
        return model
