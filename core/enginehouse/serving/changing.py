"""Changes of models at run time: commands of the operator to load and unload one, and new configurations.

Conflicts of commands are refused, not queued.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from attrs import evolve, field, frozen

from enginehouse.contract.errors import (
    ConfigError,
    EnginehouseError,
    InvalidRequest,
    ModelConflict,
    ModelLoadError,
    ModelTooLarge,
)
from enginehouse.contract.model_hub import ModelHub
from enginehouse.serving.lifecycle import EventKind, ModelEvent, ModelStatus
from enginehouse.serving.manager import ModelManager, budget_of
from enginehouse.serving.memory import footprint_in_thread
from enginehouse.serving.opening import ModelPlan, plan_in_thread
from enginehouse.serving.served import ServedModel
from enginehouse.serving.sources import UnknownBackend
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.reload import LIVE, WORKER, names_with


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
        model.plan = await plan_in_thread(model.name, model.settings, manager.registry)
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
    elif manager.is_downloading(model):
        problem = "is being downloaded; cancel-download stops that"
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


async def download_model(manager: ModelManager, name: str) -> ModelStatus:
    """Begin to download the files of a model, and return at once; no effect if that is in progress.

    A cancelled download may have completed the files all the same: the model is then planned as after a download.

    Raises:
        ModelNotFound: no model has that name.
        ModelConflict: nothing has to be downloaded.
    """
    model = manager.find(name)
    if await manager.download_on_demand(model):
        return model.status()
    nothing = f"The model {model.name!r} has no files that have to be downloaded"
    if model.state != "failed" or model.plan is not None:
        raise ModelConflict(f"{nothing}; it can be loaded.")
    await manager.plan_downloaded(model)
    if model.plan is None:
        raise ModelConflict(f"{nothing}, and cannot be loaded: {model.status().error}")
    return model.status()


def cancel_download(manager: ModelManager, name: str) -> ModelStatus:
    """Stop the download of a model; data that has arrived is kept, so that another one continues there.

    Raises:
        ModelNotFound: no model has that name.
        ModelConflict: it is not being downloaded.
    """
    model = manager.find(name)
    if not manager.stop_download(model):
        raise ModelConflict(f"The model {model.name!r} is not being downloaded.")
    model.fail("its download was cancelled")
    return model.status()


async def check_addable(manager: ModelManager, name: str, settings: ModelSettings) -> bool:
    """Check that a model could be added and loaded; False if its files have to be downloaded first.

    Raises:
        ModelConflict: its name or an alias is taken.
        InvalidRequest: no backend opens it, or a setting is invalid.
        ModelTooLarge: it does not fit into the memory budget.
        SourceNotFound: it is not downloaded.
    """
    taken = manager.settings.served_names()
    for known in (name, *settings.aliases):
        if known in taken:
            param = "id" if known == name else "aliases"
            raise ModelConflict(f"{param}: a model of this server already has the name {known!r}", param)
    hub = await manager.find_download(settings.source)  # before the plan: the files may arrive meanwhile
    try:
        plan = await plan_in_thread(name, settings, manager.registry)
    except ConfigError as error:
        raise InvalidRequest(error.message, "source") from error
    except ModelLoadError as error:
        if hub is not None:
            return False
        raise InvalidRequest(f"source: {error.message}", "source") from error
    manager.room.check(name, await footprint_in_thread(plan), "source")
    return True


def _naming_setting(error: ModelLoadError, name: str) -> ConfigError:
    """Return the error of a model's plan as one of its settings: the one that it names, else its backend or source."""
    path, colon, _ = error.message.partition(": ")
    if colon and path.startswith(f"models.{name}."):
        return ConfigError(error.message, path)
    setting = f"models.{name}.{'backend' if isinstance(error, UnknownBackend) else 'source'}"
    return ConfigError(f"{setting}: {error.message}", setting)


@frozen(kw_only=True)
class ModelChanges:
    """Model names, each in exactly one of the groups.

    Attributes:
        replaced: models that need another worker.
        updated: models that get other settings while they stay loaded.
        kept: unchanged models.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def find_changes(old: Mapping[str, ModelSettings], new: Mapping[str, ModelSettings]) -> ModelChanges:
    """Return the change of each model."""
    both = [name for name in new if name in old]
    return ModelChanges(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        replaced=tuple(name for name in both if _needs_worker(old[name], new[name])),
        updated=tuple(name for name in both if old[name] != new[name] and not _needs_worker(old[name], new[name])),
        kept=tuple(name for name in both if old[name] == new[name]),
    )


def on_same_worker(old: ModelSettings, new: ModelSettings) -> ModelSettings:
    """Return the old settings, updated by those new ones that need no other worker."""
    return evolve(old, **{name: getattr(new, name) for name in names_with(ModelSettings, LIVE)})


def _needs_worker(old: ModelSettings, new: ModelSettings) -> bool:
    return any(getattr(old, name) != getattr(new, name) for name in names_with(ModelSettings, WORKER))


_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class PlannedChanges:
    """New settings, with a plan for each model that may have to be opened.

    Attributes:
        problems: why a model has no plan, by its name; only of models in folders and of those that were added, which
            are shown as failed.
        downloads: hubs of models whose files have to be downloaded first.
    """

    settings: Settings
    plans: Mapping[str, ModelPlan]
    problems: Mapping[str, str] = field(factory=dict)
    downloads: Mapping[str, ModelHub] = field(factory=dict)


class ModelChanger:
    """Changes the models that a manager serves. One change at a time."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._swaps: dict[str, asyncio.Task[None]] = {}  # swaps that are not complete yet

    async def plan(self, settings: Settings) -> PlannedChanges:
        """Return the changes that the settings make, with plans for the new models.

        Raises:
            EnginehouseError: a model to be opened has invalid options, does not exist, or has no backend.
        """
        changes = self._changes(settings)
        # A pending swap may be complete by the time the settings are applied.
        swapped = (name for name in self._swaps if name in settings.models)
        plans: dict[str, ModelPlan] = {}
        problems: dict[str, str] = {}
        downloads: dict[str, ModelHub] = {}
        may_download = settings.server.pull or settings.server.pull_on_request
        for name in dict.fromkeys((*changes.added, *changes.replaced, *swapped)):
            model = settings.models[name]
            is_looked_for = may_download or model.origin == "added"
            hub = await self._manager.find_download(model.source) if is_looked_for else None
            try:
                plans[name] = await plan_in_thread(name, model, self._manager.registry)
            except ConfigError:
                raise
            except EnginehouseError as error:
                if hub is not None:
                    downloads[name] = hub
                elif model.origin == "settings" and isinstance(error, ModelLoadError):
                    raise _naming_setting(error, name) from error
                elif model.origin == "settings":
                    raise
                else:
                    problems[name] = error.message
        return PlannedChanges(settings=settings, plans=plans, problems=problems, downloads=downloads)

    def _changes(self, settings: Settings) -> ModelChanges:
        """Return the changes that the settings make to the current models."""
        return find_changes({name: model.settings for name, model in self._manager.models.items()}, settings.models)

    def apply(self, planned: PlannedChanges, *, retries: bool = True) -> ModelChanges:
        """Use the new settings from now on; models are opened and closed in the background.

        Args:
            retries: load failed models again, since the cause may not have been their settings.

        Raises:
            ServerStopping: the manager is closed; nothing was changed.
        """
        manager, settings = self._manager, planned.settings
        manager.check_open()
        changes = self._changes(settings)
        manager.settings = settings
        manager.room.budget, manager.room.drain_s = budget_of(settings), settings.limits.drain_s
        old = manager.models
        for swap in self._swaps.values():
            swap.cancel()  # the new model that it would bring is outdated
        self._swaps = {}
        new = {name: manager.make(name, settings.models[name]) for name in (*changes.added, *changes.replaced)}
        for name, model in new.items():
            model.plan = planned.plans.get(name)
        for name in (*changes.updated, *changes.replaced):
            old[name].use_settings(on_same_worker(old[name].settings, settings.models[name]))
        manager.put({name: new[name] if name in changes.added else old[name] for name in settings.models})
        for name in changes.removed:
            self._publish("removed", old[name])
            self._retire(old[name])
        for name in changes.added:
            self._publish("added", new[name])
        for name in planned.problems.keys() & new.keys():
            new[name].fail(planned.problems[name])
        for name in planned.downloads.keys() & new.keys():
            self._await_download(new[name], planned.downloads[name])
        if planned_models := [new[name] for name in changes.added if new[name].plan is not None]:
            manager.run(asyncio.create_task(manager.begin_eager(planned_models)))
        for name in (*changes.updated, *changes.kept) if retries else ():
            if old[name].state == "failed":
                manager.run(asyncio.create_task(self._retry(name)))
        for name in changes.replaced:
            self._swaps[name] = asyncio.create_task(self._swap(old[name], new[name]))
            manager.run(self._swaps[name])
        return changes

    def _await_download(self, model: ServedModel, hub: ModelHub) -> None:
        """Begin a download, or leave that to the first request or, for added models, to ``ConfigSnapshots``."""
        if model.settings.origin == "added":
            return
        if self._manager.settings.server.pull:
            self._manager.begin_download(model, hub)
        else:
            model.postpone()

    async def _swap(self, old: ServedModel, new: ServedModel) -> None:
        """Replace ``old`` by ``new``: loaded before ``old`` is unloaded, if there is enough memory for both."""
        manager = self._manager
        try:
            if new.plan is None:  # its file is not usable any more, or has to be downloaded
                self._take_place(new)
                self._retire(old)
            elif not old.is_serving:
                self._take_place(new)
                self._retire(old)  # it may be about to be loaded
                await manager.begin_eager([new])
            elif not await self._has_room_beside(old, new):
                self._take_place(new)
                new.begin(manager.settings, on_demand=True, after=self._retire(old))
            else:
                new.begin(manager.settings, on_demand=False)
                await new.settled()
                if (error := new.status().error) is None:  # it is loaded, or was already evicted for another model
                    self._take_place(new)
                    self._retire(old)
                else:
                    problem = f"its new configuration could not be loaded, so the old one stays: {error}"
                    old.note(problem)
                    _log.error("model %s: %s", old.name, problem)
        finally:
            if manager.models.get(new.name) is not new:
                await new.close()

    async def _retry(self, name: str) -> None:
        try:
            await load_model(self._manager, name)
        except EnginehouseError as error:
            _log.error("model %s: %s", name, error.message)

    async def _has_room_beside(self, old: ServedModel, new: ServedModel) -> bool:
        """True if both fit; the memory of ``new`` is then reserved."""
        assert new.plan is not None
        footprint = await footprint_in_thread(new.plan)
        room = self._manager.room
        if room.footprint(old) is None:
            return False  # it waits for memory itself, which must not go to the model that waits for its place
        try:
            return room.claim(new, footprint)
        except ModelTooLarge:  # beside the old one, if that is pinned; after the old one is gone, loading reports it
            return False

    def _take_place(self, new: ServedModel) -> None:
        self._swaps.pop(new.name)
        self._manager.put({**self._manager.models, new.name: new})
        self._publish("replaced", new)

    def _retire(self, model: ServedModel) -> asyncio.Task[None]:
        """Unload a model that can no longer be requested; requests that take too long end with an error.

        Uses a separate task: the next settings change may come meanwhile, and must not cut those requests short.
        """

        async def retire() -> None:
            try:
                await model.unload(self._manager.settings.limits.drain_s, force=True, holds_back=False)
                model.forward_waiters()
            finally:
                await model.close()

        self._manager.stop_download(model)
        task = asyncio.create_task(retire())
        self._manager.run(task)
        return task

    def _publish(self, kind: EventKind, model: ServedModel) -> None:
        self._manager.publish(ModelEvent(kind=kind, model=model.name, instance=model.instance))
