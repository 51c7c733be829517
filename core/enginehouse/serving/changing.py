"""A new configuration meets the served models: some appear, some leave, some are replaced, the others do not notice.

Planning comes first and may refuse everything; applying fails only where the server ends. Called by whoever reloads
settings; the objects that requests meet besides models are not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from attrs import frozen

from enginehouse.contract.errors import EnginehouseError, ModelTooLarge
from enginehouse.serving.changes import ModelChanges, find_changes, on_same_worker
from enginehouse.serving.events import EventKind, ModelEvent
from enginehouse.serving.manager import ModelManager, budget_of
from enginehouse.serving.memory import footprint_apart
from enginehouse.serving.opening import ModelPlan, plan_apart
from enginehouse.serving.orders import load_model
from enginehouse.serving.served import ServedModel
from enginehouse.settings.config import Settings

__all__ = ["ModelChanger", "PlannedChanges"]

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class PlannedChanges:
    """New settings, with a plan for each model that may have to be opened."""

    settings: Settings
    plans: Mapping[str, ModelPlan]


class ModelChanger:
    """Changes what a manager serves. One change at a time."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._swaps: dict[str, asyncio.Task[None]] = {}  # those that have not taken place yet

    async def plan(self, settings: Settings) -> PlannedChanges:
        """What the settings change, and how new models will be opened.

        Raises:
            EnginehouseError: a model that is to be opened has wrong options, is not there, or has no backend.
        """
        changes = self._changes(settings)
        # A swap that is under way may have taken place when the settings are applied.
        swapped = (name for name in self._swaps if name in settings.models)
        plans = {
            name: await plan_apart(name, settings.models[name], self._manager.registry)
            for name in dict.fromkeys((*changes.added, *changes.replaced, *swapped))
        }
        return PlannedChanges(settings=settings, plans=plans)

    def _changes(self, settings: Settings) -> ModelChanges:
        """What the settings change about the models as they are now."""
        return find_changes({name: model.settings for name, model in self._manager.models.items()}, settings.models)

    def apply(self, planned: PlannedChanges) -> ModelChanges:
        """Serve by the new settings from now on; models that must be opened or closed are, in the background.

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
            swap.cancel()  # what it was about to bring is out of date
        self._swaps = {}
        new = {name: manager.make(name, settings.models[name]) for name in (*changes.added, *changes.replaced)}
        for name, model in new.items():
            model.plan = planned.plans[name]
        for name in (*changes.updated, *changes.replaced):
            old[name].use_settings(on_same_worker(old[name].settings, settings.models[name]))
        manager.put({name: new[name] if name in changes.added else old[name] for name in settings.models})
        for name in changes.removed:
            self._publish("removed", old[name])
            self._retire(old[name])
        for name in changes.added:
            self._publish("added", new[name])
        if changes.added:
            manager.run(asyncio.create_task(manager.begin_eager([new[name] for name in changes.added])))
        for name in (*changes.updated, *changes.kept):
            if old[name].state == "failed":
                manager.run(asyncio.create_task(self._retry(name)))
        for name in changes.replaced:
            self._swaps[name] = asyncio.create_task(self._swap(old[name], new[name]))
            manager.run(self._swaps[name])
        return changes

    async def _swap(self, old: ServedModel, new: ServedModel) -> None:
        """Let ``new`` take the place of ``old``: loaded before that one goes, where the memory is enough for both."""
        manager = self._manager
        try:
            if not old.is_serving:
                self._take_place(new)
                self._retire(old)  # somebody may be about to load it
                await manager.begin_eager([new])
            elif not await self._has_room_beside(old, new):
                self._take_place(new)
                new.begin(manager.settings, on_demand=True, after=self._retire(old))
            else:
                new.begin(manager.settings, on_demand=False)
                await new.settled()
                if (error := new.status().error) is None:  # it is there, or had to make way for another model already
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
        """Give a failed model another chance: what was wrong may not have been its settings."""
        try:
            await load_model(self._manager, name)
        except EnginehouseError as error:
            _log.error("model %s: %s", name, error.message)

    async def _has_room_beside(self, old: ServedModel, new: ServedModel) -> bool:
        """Whether both fit; the room of ``new`` is then taken."""
        assert new.plan is not None
        footprint = await footprint_apart(new.plan)
        room = self._manager.room
        if room.footprint(old) is None:
            return False  # it waits for room itself, which must not go to the one that waits for its place
        try:
            return room.claim(new, footprint)
        except ModelTooLarge:  # beside the old one, if that is pinned; when it is gone, loading will say
            return False

    def _take_place(self, new: ServedModel) -> None:
        self._swaps.pop(new.name)
        self._manager.put({**self._manager.models, new.name: new})
        self._publish("replaced", new)

    def _retire(self, model: ServedModel) -> asyncio.Task[None]:
        """Unload a model that nobody can ask for any more; requests that take too long end with an error.

        A task of its own: the next change of settings may come meanwhile, and must not hurry those requests.
        """

        async def retire() -> None:
            try:
                await model.unload(self._manager.settings.limits.drain_s, force=True, holds_back=False)
                model.pass_on()
            finally:
                await model.close()

        self._manager.stop_download(model)
        task = asyncio.create_task(retire())
        self._manager.run(task)
        return task

    def _publish(self, kind: EventKind, model: ServedModel) -> None:
        self._manager.publish(ModelEvent(kind=kind, model=model.name, instance=model.instance))
