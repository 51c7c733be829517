"""Optional parts of a model that its settings enable: saved states, early exit, drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.drafter import HeadDrafter, LayerBackend, LayerDrafter
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.sources import check_backend, choose_backend, find_source, no_such_model
from enginehouse.settings.config import ModelSettings, structure_options
from enginehouse.settings.optimisations import DrafterSettings
from enginehouse.workers.messages import DrafterLoad, ExitPolicyLoad, ModelLoad, PrefixDiskLoad


def plan_prefix_disk(name: str, settings: ModelSettings, backend: Backend) -> PrefixDiskLoad | None:
    """Return the model's own folder below the configured one; None if none is configured.

    Raises:
        ConfigError: the model does not have a prefix cache to save.
    """
    if settings.prefix_cache_dir is None:
        return None
    path = f"models.{name}.prefix_cache_dir"
    if not settings.prefix_cache:
        raise ConfigError(f"{path}: there is nothing to save without a prefix cache; remove one of the two", path)
    if backend.opens != "model":
        reason = f"the backend {backend.name!r} forwards requests; it has no prefix cache here"
        raise ConfigError(f"{path}: {reason}", path)
    # A name may hold slashes or consist of dots; quoted, it is one folder name, which no other model name maps to.
    quoted = quote(name, safe=" ").replace(".", "%2E") if name.startswith(".") else quote(name, safe=" ")
    folder = Path(settings.prefix_cache_dir).expanduser() / quoted
    return PrefixDiskLoad(folder=str(folder), max_bytes=settings.prefix_cache_disk.num_bytes, setting=path)


def plan_exit_policy(
    name: str, settings: ModelSettings, backend: Backend, registry: PluginRegistry
) -> ExitPolicyLoad | None:
    """Check the exit policy of a model; None if it has none.

    Raises:
        ConfigError: the policy is unknown, one of its settings is invalid, the backend does not run the model here, or
            the model also has drafters.
    """
    chosen, path = settings.exit_policy, f"models.{name}.exit_policy"
    if chosen is None:
        return None
    known = registry.exit_policies.get(chosen.name)
    if known is None:
        raise ConfigError(registry.missing("exit policy", chosen.name, registry.exit_policies), path)
    structure_options(known.options, chosen.options, path, also_known=("name",))
    if backend.opens != "model":
        reason = f"the backend {backend.name!r} forwards requests; it does not support early exit"
        raise ConfigError(f"{path}: {reason}", path)
    if settings.drafters:
        reason = "drafts are verified by all layers, so that the two would write different texts; remove one of them"
        raise ConfigError(f"{path}: early exit and drafters exclude each other: {reason}", path)
    return ExitPolicyLoad(name=chosen.name, options=chosen.options, options_path=path)


SecondModel = tuple[ModelSource, Backend, dict[str, Any]]
"""A model, its backend and that backend's settings as plain data."""

_USUAL = "prediction"  # proposes only tokens of the request itself, so it is enabled by default


@frozen(kw_only=True)
class DrafterPlan:
    """One drafter of a model.

    Attributes:
        options: the drafter's own settings, as plain data.
        options_path: their dotted path in the configuration, for messages.
        second: the second model, or the files of the draft head, that it uses; None if it uses none.
    """

    name: str
    options: dict[str, Any]
    options_path: str
    second: SecondModel | None = None

    def to_load(self) -> DrafterLoad:
        """Return the drafter as part of the Load message."""
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


def plan_drafters(
    name: str, settings: ModelSettings, registry: PluginRegistry, model: SecondModel
) -> tuple[DrafterPlan, ...]:
    """Check the drafters of a model; blocking, but fast.

    Args:
        model: the model itself, as it will be opened.

    Raises:
        ConfigError: a drafter is unknown, given twice, or one of its settings is invalid.
        ModelLoadError: the second model does not exist or no backend opens it, or the model cannot be split between its
            layers.
    """
    if settings.drafters is None:
        usual = registry.drafters.get(_USUAL)
        return (DrafterPlan(name=_USUAL, options={}, options_path=f"models.{name}.drafters"),) if usual else ()
    plans: list[DrafterPlan] = []
    for index, drafter in enumerate(settings.drafters):
        path = f"models.{name}.drafters[{index}]"
        if any(drafter.name == other.name for other in plans):
            raise ConfigError(f"{path}: {drafter.name!r} is listed twice", path)
        plans.append(_plan(drafter, path, settings, registry, model))
    return tuple(plans)


def _plan(
    drafter: DrafterSettings, path: str, settings: ModelSettings, registry: PluginRegistry, model: SecondModel
) -> DrafterPlan:
    known = registry.drafters.get(drafter.name)
    if known is None:
        raise ConfigError(registry.missing("drafter", drafter.name, registry.drafters), path)
    options = structure_options(known.options, drafter.options, path, also_known=("source", "backend", "settings"))
    second: SecondModel | None = None
    if isinstance(known, LayerDrafter):
        second = _first_layers(drafter, path, model, lambda num_layers: known.choose_layers(options, num_layers))
    elif isinstance(known, HeadDrafter):
        second = _head(drafter, path, registry, model)
    elif drafter.source is not None:
        second = _second_model(drafter, path, settings, registry)
    elif named := _first_set(drafter, "backend", "settings"):
        raise ConfigError(
            f"{path}.{named}: it applies to a second model; set 'source' to that model", f"{path}.{named}"
        )
    return DrafterPlan(name=drafter.name, options=drafter.options, options_path=path, second=second)


def _second_model(drafter: DrafterSettings, path: str, model: ModelSettings, registry: PluginRegistry) -> SecondModel:
    assert drafter.source is not None
    source = find_source(drafter.source, registry)
    if source.path is None:
        raise no_such_model(drafter.source, registry)
    check_backend(drafter.backend, registry)
    backend = choose_backend(source, drafter.backend, registry.backends, probe=model.python is None).backend
    if backend.opens != "model":
        raise ConfigError(f"{path}.backend: a drafter needs a model that runs here", f"{path}.backend")
    known = {attribute.name for attribute in attrs.fields(backend.options)}
    shared = {name: getattr(model, name) for name in ("context", "slots") if name in known}
    options = {**shared, **drafter.settings}
    structure_options(backend.options, options, f"{path}.settings")
    return source, backend, options


def _head(drafter: DrafterSettings, path: str, registry: PluginRegistry, model: SecondModel) -> SecondModel | None:
    """Return the files of a draft head, for the model's own backend; None if the drafter names none."""
    _, backend, options = model
    if named := _first_set(drafter, "backend", "settings"):
        reason = f"the model's own backend opens the head of {drafter.name!r}; remove the setting"
        raise ConfigError(f"{path}.{named}: {reason}", f"{path}.{named}")
    if drafter.source is None:
        return None
    source = find_source(drafter.source, registry)
    if source.path is None:
        raise no_such_model(drafter.source, registry)
    return source, backend, options


def _first_layers(
    drafter: DrafterSettings, path: str, model: SecondModel, choose: Callable[[int], int]
) -> SecondModel | None:
    """Return the model's first layers as a second model; None if the backend cannot open them separately."""
    source, backend, options = model
    if named := _first_set(drafter, "source", "backend"):
        reason = f"{drafter.name!r} drafts with layers of the model itself; remove the setting"
        raise ConfigError(f"{path}.{named}: {reason}", f"{path}.{named}")
    if not isinstance(backend, LayerBackend):
        if drafter.settings:
            reason = f"the backend {backend.name!r} opens no second model for {drafter.name!r}; remove the settings"
            raise ConfigError(f"{path}.settings: {reason}", f"{path}.settings")
        return None
    try:
        num_layers = backend.count_layers(source)
    except ModelLoadError as error:
        raise ModelLoadError(f"the drafter {drafter.name!r}: {error.message}") from error
    chosen = choose(num_layers)
    if not 0 < chosen < num_layers:
        reason = f"the model has {num_layers} layers, of which the first 1 to {num_layers - 1} can draft, not {chosen}"
        raise ConfigError(f"{path}.num_layers: {reason}", f"{path}.num_layers")
    options = {**options, **drafter.settings, "num_layers": chosen}
    structure_options(backend.options, options, f"{path}.settings")
    return source, backend, options


def _first_set(drafter: DrafterSettings, *names: str) -> str | None:
    """Return the first of these settings that the drafter has; None if it has none."""
    return next((name for name in names if getattr(drafter, name)), None)
