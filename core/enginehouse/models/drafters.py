"""Drafters that a model's settings name -> a plan: each one's settings checked, and its second model found."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from enginehouse.backend import Backend, ModelSource
from enginehouse.config import ModelSettings, structure_options
from enginehouse.drafter_settings import DrafterSettings
from enginehouse.engine.worker import DrafterLoad, ModelLoad
from enginehouse.errors import ConfigError
from enginehouse.models.choice import choose_backend
from enginehouse.models.sources import find_source, no_such_model
from enginehouse.plugins import PluginRegistry
from enginehouse.structuring import closest

__all__ = ["DrafterPlan", "plan_drafters"]

_USUAL = "prediction"  # proposes only what a request itself brings, so it is at work where nothing else is said


@frozen(kw_only=True)
class DrafterPlan:
    """One drafter of a model.

    Attributes:
        options: the drafter's own settings, as plain data.
        options_path: dotted path of them in the configuration, for messages.
        second: the second model that it uses, its backend and that backend's settings; None without one.
    """

    name: str
    options: dict[str, Any]
    options_path: str
    second: tuple[ModelSource, Backend, dict[str, Any]] | None = None

    def to_load(self) -> DrafterLoad:
        """What the worker is told."""
        model = None
        if self.second is not None:
            source, backend, options = self.second
            path = str(source.path) if source.path is not None else None
            settings_path = f"{self.options_path}.settings"
            model = ModelLoad(
                backend=backend.name,
                source_text=source.text,
                source_path=path,
                options=options,
                options_path=settings_path,
            )
        return DrafterLoad(name=self.name, options=self.options, options_path=self.options_path, model=model)


def plan_drafters(name: str, settings: ModelSettings, registry: PluginRegistry) -> tuple[DrafterPlan, ...]:
    """Check the drafters of a model; blocking, but quick.

    Raises:
        ConfigError: there is no such drafter, it stands twice, or one of its settings is wrong.
        ModelLoadError: there is no such second model, or no backend for it.
    """
    if settings.drafters is None:
        usual = registry.drafters.get(_USUAL)
        return (DrafterPlan(name=_USUAL, options={}, options_path=f"models.{name}.drafters"),) if usual else ()
    plans: list[DrafterPlan] = []
    for index, drafter in enumerate(settings.drafters):
        path = f"models.{name}.drafters[{index}]"
        if any(drafter.name == other.name for other in plans):
            raise ConfigError(f"{path}: {drafter.name!r} stands twice", path)
        plans.append(_plan(drafter, path, settings, registry))
    return tuple(plans)


def _plan(drafter: DrafterSettings, path: str, model: ModelSettings, registry: PluginRegistry) -> DrafterPlan:
    known = registry.drafters.get(drafter.name)
    if known is None:
        hint = closest(drafter.name, tuple(registry.drafters))
        raise ConfigError(f"{path}: there is no drafter {drafter.name!r}{hint}", path)
    structure_options(known.options, drafter.options, path, also_known=("source", "backend", "settings"))
    second = _second_model(drafter, path, model, registry) if drafter.source is not None else None
    return DrafterPlan(name=drafter.name, options=drafter.options, options_path=path, second=second)


def _second_model(
    drafter: DrafterSettings, path: str, model: ModelSettings, registry: PluginRegistry
) -> tuple[ModelSource, Backend, dict[str, Any]]:
    assert drafter.source is not None
    source = find_source(drafter.source, registry.model_sources)
    if source.path is None:
        raise no_such_model(drafter.source, registry.model_sources)
    backend = choose_backend(source, drafter.backend, registry.backends, probe=model.python is None).backend
    if backend.opens != "runner":
        raise ConfigError(f"{path}.backend: a drafter needs a model that runs here", f"{path}.backend")
    known = {attribute.name for attribute in attrs.fields(backend.options)}
    shared = {name: getattr(model, name) for name in ("context", "slots") if name in known}
    options = {**shared, **drafter.settings}
    structure_options(backend.options, options, f"{path}.settings")
    return source, backend, options
