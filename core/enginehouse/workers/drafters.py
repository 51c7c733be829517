"""Binds the drafters of a model in its worker, and opens the second models that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from attrs import define

from enginehouse.contract.backend import Backend, ModelSource, Progress, Runner
from enginehouse.contract.drafter import BoundDrafter, DraftContext
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import structure_options
from enginehouse.workers.messages import DrafterLoad, Load, ModelLoad

__all__ = ["bind_drafters", "find_backend", "open_runner"]


def open_runner(backend: Backend, model: Load | ModelLoad, progress: Progress) -> Runner:
    """Open a model on this thread."""
    options = structure_options(backend.options, model.options, model.options_path)
    path = Path(model.source_path) if model.source_path is not None else None
    return cast(Runner, backend.open(ModelSource(text=model.source_text, path=path), options, progress))


def find_backend(registry: PluginRegistry, name: str) -> Backend:
    """The backend of that name; raises ModelLoadError with what this process knows of plugins that failed."""
    backend = registry.backends.get(name)
    if backend is None:
        problems = "; ".join(record.problem for record in registry.plugins if record.problem)
        raise ModelLoadError(f"the worker has no backend {name!r}" + (f" ({problems})" * bool(problems)))
    return backend


def bind_drafters(
    registry: PluginRegistry, loads: Sequence[DrafterLoad], runner: Runner, slots: int, progress: Progress
) -> Mapping[str, BoundDrafter]:
    """Bind each drafter to the model of ``runner``; those bound before one that fails are shut down.

    Raises:
        ModelLoadError: a drafter is missing here, or cannot draft for this model.
    """
    bound: dict[str, BoundDrafter] = {}
    try:
        for load in loads:
            bound[load.name] = _bind(registry, load, runner, slots, progress)
    except BaseException:
        for drafter in bound.values():
            drafter.shutdown()
        raise
    return bound


def _bind(registry: PluginRegistry, load: DrafterLoad, runner: Runner, slots: int, progress: Progress) -> BoundDrafter:
    drafter = registry.drafters.get(load.name)
    if drafter is None:
        raise ModelLoadError(f"the worker has no drafter {load.name!r}")
    options = structure_options(drafter.options, load.options, load.options_path)
    second = _Second(registry, load.model, progress) if load.model is not None else None
    try:
        bound = drafter.bind(DraftContext(runner, slots, second), options)
    except EnginehouseError as error:
        raise ModelLoadError(f"the drafter {load.name!r}: {error.message}") from error
    if second is not None and not second.was_opened:
        bound.shutdown()
        raise ModelLoadError(f"the drafter {load.name!r} uses no second model; remove its 'source'")
    return bound


@define
class _Second:
    """Opens a second model, and remembers that it did."""

    registry: PluginRegistry
    model: ModelLoad
    progress: Progress
    was_opened: bool = False

    def __call__(self) -> Runner:
        """The runner of the second model."""
        self.was_opened = True
        return open_runner(find_backend(self.registry, self.model.backend), self.model, self.progress)
