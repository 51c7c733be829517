"""The engines that serve now, and pictures of those that show their inside, taken without waiting long for any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attrs import frozen

from enginehouse.backend import Engine
from enginehouse.errors import EnginehouseError
from enginehouse.inspection import EngineView, Inspectable
from enginehouse.models import ModelManager

__all__ = ["Engines"]

_PATIENCE_S = 1.0
"""An engine answers between two steps; of one that takes longer there is no picture."""


@frozen(eq=False)
class Engines:
    """The engines of one server. ``get`` is told of a model by its name."""

    manager: ModelManager

    def get(self, model: str) -> Engine | None:
        """The engine that serves a model now."""
        try:
            return self.manager.get(model).engine
        except EnginehouseError:
            return None

    def all(self) -> dict[str, Engine]:
        """Every engine that serves now, by model."""
        found = {status.name: self.get(status.name) for status in self.manager.statuses() if status.state == "ready"}
        return {name: engine for name, engine in found.items() if engine is not None}

    async def views(self, wanted: Callable[[str], bool] = lambda model: True) -> dict[str, EngineView]:
        """The pictures that could be had, by model."""
        engines = {name: engine for name, engine in self.all().items() if wanted(name)}
        inspectable = {name: engine for name, engine in engines.items() if isinstance(engine, Inspectable)}
        views = await asyncio.gather(*(_take(engine) for engine in inspectable.values()))
        return {name: view for name, view in zip(inspectable, views, strict=True) if view is not None}

    def restarting(self) -> frozenset[str]:
        """Models that served before and do not now."""
        return frozenset(status.name for status in self.manager.statuses() if status.state == "restarting")


async def _take(engine: Inspectable) -> EngineView | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await engine.view()
    except (TimeoutError, EnginehouseError):
        return None
