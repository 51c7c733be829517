"""Where the pipeline submits requests, so that they outlive the workers that answer them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from enginehouse.backend import Generation
from enginehouse.engine.worker import WorkerEngine
from enginehouse.models import LoadedModel
from enginehouse.models.served import ServedModel
from enginehouse.replay.home import ModelHome
from enginehouse.types import EngineRequest

__all__ = ["Replays"]


class Replays:
    """One per server. Lives on the event loop.

    Args:
        max_waiting: requests per model that may wait while others are on trial.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._homes: WeakKeyDictionary[ServedModel, ModelHome] = WeakKeyDictionary()

    async def submit(self, model: LoadedModel, request: EngineRequest) -> Generation:
        """Bring a request to a model; returns when it is accepted.

        Models whose settings switch replays off, and engines that have no worker, answer it themselves: their end is
        its end.

        Raises:
            RequestError, Overloaded, EngineDead: as :meth:`enginehouse.backend.Engine.submit`.
            RequestKillsWorker: workers die of it.
        """
        if not model.settings.replay or not isinstance(model.engine, WorkerEngine):
            return await model.engine.submit(request)
        home = self._homes.get(model.served)
        if home is None:
            home = self._homes[model.served] = ModelHome(model.served, self._max_waiting)
        return await home.submit(model, request)
