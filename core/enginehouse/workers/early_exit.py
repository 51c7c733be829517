"""Binds a model's exit policy in its worker. A policy that fails is switched off: all layers are always right."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.contract.exit_policy import BoundExitPolicy, ExitContext, ExitView, LayerAccess
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import structure_options
from enginehouse.workers.messages import ExitPolicyLoad

__all__ = ["GuardedExitPolicy", "use_exit_policy"]

_log = logging.getLogger(__name__)


class GuardedExitPolicy:
    """A policy whose failures and wrong answers keep every token inside, from then on."""

    def __init__(self, name: str, policy: BoundExitPolicy) -> None:
        self.layers = policy.layers
        self._name = name
        self._policy = policy
        self._has_failed = False

    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        """(num_rows,) bool, on the host."""
        num_rows = len(view.hidden)
        if self._has_failed:
            return np.zeros(num_rows, np.bool_)
        try:
            mask = np.asarray(self._policy.leaves(view))
            if mask.shape != (num_rows,) or mask.dtype != np.bool_:
                raise TypeError(f"a mask of {num_rows} bools is wanted, not {mask.dtype} of the shape {mask.shape}")
        except Exception:  # noqa: BLE001 - plugin border: its answer is not needed
            _log.exception("the exit policy %r failed and is off until the model is loaded again", self._name)
            self._has_failed = True
            return np.zeros(num_rows, np.bool_)
        return mask


def use_exit_policy(registry: PluginRegistry, load: ExitPolicyLoad, runner: Runner, backend: str) -> None:
    """Bind the policy to the runner's model and set it to work.

    Raises:
        ModelLoadError: the runner's layers cannot be left, the policy is missing here, or cannot decide for this model.
    """
    if not isinstance(runner, LayerAccess):
        raise ModelLoadError(
            f"{load.options_path}: the backend {backend!r} has no access to the layers of this model, so that no token "
            "could leave them early; remove the setting, or use a backend that has (docs/early-exit.md names them)"
        )
    policy = registry.exit_policies.get(load.name)
    if policy is None:
        raise ModelLoadError(f"the worker has no exit policy {load.name!r}")
    options = structure_options(policy.options, load.options, load.options_path)
    context = ExitContext(runner.num_layers, runner.capabilities.exit_layers)
    try:
        bound = policy.bind(context, options)
        unknown = sorted(set(bound.layers) - set(context.exit_layers))
        if unknown:
            raise ModelLoadError(f"it asks to be asked behind the layers {unknown}, which cannot be left")
        runner.use_exit_policy(GuardedExitPolicy(load.name, bound))
    except EnginehouseError as error:
        raise ModelLoadError(f"the exit policy {load.name!r}: {error.message}") from error
