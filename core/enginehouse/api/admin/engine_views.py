"""The engines that serve now, and pictures of those that show their inside, taken without waiting long for any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attrs import frozen

from enginehouse.contract.backend import Engine
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import EngineView
from enginehouse.replay import Replays
from enginehouse.serving import LoadedModel, ModelManager

__all__ = ["Engines"]

_PATIENCE_S = 1.0
"""An engine answers between two steps, and not beside a suspect; of one that takes longer there is no picture."""


@frozen(eq=False)
class Engines:
    """The engines of one server. ``get`` is told of a model by its name."""

    manager: ModelManager
    replays: Replays

    def get(self, model: str) -> Engine | None:
        """The engine that serves a model now."""
        loaded = self._loaded(model)
        return loaded.engine if loaded is not None else None

    def _loaded(self, model: str) -> LoadedModel | None:
        try:
            return self.manager.get(model)
        except EnginehouseError:
            return None

    def all(self) -> dict[str, Engine]:
        """Every engine that serves now, by model."""
        return {name: loaded.engine for name, loaded in self._all().items()}

    def _all(self) -> dict[str, LoadedModel]:
        names = [status.name for status in self.manager.statuses() if status.state == "ready"]
        found = {name: self._loaded(name) for name in names}
        return {name: loaded for name, loaded in found.items() if loaded is not None}

    async def views(self, caller: str, wanted: Callable[[str], bool] = lambda model: True) -> dict[str, EngineView]:
        """The pictures that could be had for a caller, by model."""
        models = {name: loaded for name, loaded in self._all().items() if wanted(name)}
        views = await asyncio.gather(*(self._view(loaded, caller) for loaded in models.values()))
        return {name: view for name, view in zip(models, views, strict=True) if view is not None}

    async def _view(self, model: LoadedModel, caller: str) -> EngineView | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.replays.view(model, caller)
        except (TimeoutError, EnginehouseError):
            return None

    def restarting(self) -> frozenset[str]:
        """Models that served before and do not now."""
        return frozenset(status.name for status in self.manager.statuses() if status.state == "restarting")
