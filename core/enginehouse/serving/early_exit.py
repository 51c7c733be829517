"""The exit policy that a model's settings name -> what its worker is told, checked as far as that needs no model."""

from __future__ import annotations

from enginehouse.contract.backend import Backend
from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, structure_options
from enginehouse.settings.structuring import closest
from enginehouse.workers import ExitPolicyLoad

__all__ = ["plan_exit_policy"]


def plan_exit_policy(
    name: str, settings: ModelSettings, backend: Backend, registry: PluginRegistry
) -> ExitPolicyLoad | None:
    """Check the exit policy of a model; None where it has none.

    Raises:
        ConfigError: there is no such policy, one of its settings is wrong, the backend runs no model here, or the model
            has drafters as well.
    """
    chosen, path = settings.exit_policy, f"models.{name}.exit_policy"
    if chosen is None:
        return None
    known = registry.exit_policies.get(chosen.name)
    if known is None:
        hint = closest(chosen.name, tuple(registry.exit_policies))
        raise ConfigError(f"{path}: there is no exit policy {chosen.name!r}{hint}", path)
    structure_options(known.options, chosen.options, path, also_known=("name",))
    if backend.opens != "runner":
        reason = f"the backend {backend.name!r} hands requests on; it has no layers that could be left"
        raise ConfigError(f"{path}: {reason}", path)
    if settings.drafters:
        reason = "drafts are verified by all layers, so that the two would write different texts; remove one of them"
        raise ConfigError(f"{path}: early exit and drafters exclude each other: {reason}", path)
    return ExitPolicyLoad(name=chosen.name, options=chosen.options, options_path=path)
