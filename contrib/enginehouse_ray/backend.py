"""The backend ``ray``. Imports Ray only when a model is placed."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.contract.fleet import Fleet, PlacedWorkers
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse_ray.options import RayModelOptions, RayOptions

__all__ = ["RayBackend", "check_installed"]


def check_installed() -> None:
    """Raise MissingDependency if Ray Serve is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("fastapi") is None:
        raise MissingDependency("ray[serve]", "ray")


class RayBackend:
    """Places the workers of a model as replicas of Ray Serve; see :class:`enginehouse.contract.fleet.PlacesWorkers`.

    Args:
        options: the settings of the plugin.
    """

    name = "ray"
    api_version = API_VERSION
    options: type[Any] = RayModelOptions
    opens: Literal["workers"] = "workers"

    def __init__(self, options: RayOptions) -> None:
        self._options = options

    def probe(self) -> Probe:
        """See the contract."""
        try:
            check_installed()
        except MissingDependency as error:
            return Probe(available=False, reason=error.message)
        return Probe(available=True, devices=("remote",))

    def match(self, source: ModelSource) -> Match:
        """See the contract."""
        return Match(0.0, "models are placed on a Ray cluster only with backend = 'ray'")

    def estimate(self, source: ModelSource, options: RayModelOptions) -> MemoryEstimate:
        """See the contract: the memory is that of other machines."""
        return MemoryEstimate(0, 0, 0)

    def open(self, source: ModelSource, options: RayModelOptions, progress: Progress) -> Engine:
        """See the contract; never called by the server."""
        raise ModelLoadError("the backend 'ray' places workers on a cluster; it opens no model itself")

    async def place(
        self, model: str, load: bytes, options: RayModelOptions, fleet: Fleet, progress: Progress
    ) -> PlacedWorkers:
        """See the contract."""
        check_installed()
        from enginehouse_ray.placement import RayPlacement  # noqa: PLC0415 - imports Ray

        return await RayPlacement.open(model, load, options, self._options.address, fleet, progress)
