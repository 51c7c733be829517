"""Operator commands for a model while the server runs: load, unload. Conflicts are refused, not queued."""

from __future__ import annotations

from enginehouse.contract.errors import ModelConflict
from enginehouse.serving.manager import ModelManager
from enginehouse.serving.opening import plan_apart
from enginehouse.serving.status import ModelStatus

__all__ = ["load_model", "unload_model"]


async def load_model(manager: ModelManager, name: str) -> ModelStatus:
    """Load a model and wait until it is ready. A failed one is tried again; concurrent callers share one load.

    Raises:
        ModelNotFound: no model has that name.
        ModelConflict: it is being unloaded.
        EngineError: it cannot be loaded, with the reason.
    """
    model = manager.find(name)
    if model.is_leaving:
        raise ModelConflict(f"The model {model.name!r} is being unloaded; load it when that is done.")
    if not model.is_serving and model.state in ("unloaded", "failed"):
        model.plan = await plan_apart(model.name, model.settings, manager.registry)
        model = manager.find(model.name)  # a new configuration may have replaced it
        model.begin(manager.settings, on_demand=True)
    lease = await model.lease(None)
    lease.release()
    return lease.model.served.status()


async def unload_model(
    manager: ModelManager, name: str, *, drain: bool = False, force: bool = False, drain_s: float | None = None
) -> ModelStatus:
    """Unload a model and wait until its worker is gone; the next request for it loads it again.

    Args:
        drain: let running requests finish, within ``drain_s`` (None uses the settings); new ones wait.
        force: end running requests and a load now, and ignore ``pin``.

    Raises:
        ModelNotFound: no model has that name.
        ModelConflict: it is loading, pinned, in use or already being unloaded, and no argument resolves that.
    """
    model = manager.find(name)
    problem = None
    if model.is_leaving and not (drain or force):
        problem = "is already being unloaded"
    elif model.state == "loading" and not force:
        problem = "is loading; use force to stop that"
    elif model.is_pinned and not force:
        problem = "is pinned; use force to unload it all the same"
    elif model.uses and not (drain or force):
        problem = f"answers {len(model.uses)} requests; use drain to let them finish, or force to end them"
    if problem is not None:
        raise ModelConflict(f"The model {model.name!r} {problem}.")
    seconds = manager.settings.limits.drain_s if drain_s is None else drain_s
    if not await model.unload(seconds if drain else 0.0, force=force):
        raise ModelConflict(f"The model {model.name!r} still answers requests, so it stays loaded.")
    return model.status()
