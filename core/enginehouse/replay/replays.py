"""Entry point for requests and calls that survive the death of a worker; called by the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from enginehouse.contract.backend import Generation
from enginehouse.contract.inspection import EngineView, Inspectable
from enginehouse.contract.types import EngineRequest, Segment
from enginehouse.replay.generation import ReplayedGeneration
from enginehouse.replay.model_work import ModelWork
from enginehouse.replay.questions import Ask, Question
from enginehouse.serving import LoadedModel
from enginehouse.serving.served import ServedModel
from enginehouse.workers.client import WorkerEngine

__all__ = ["Replays"]

_T = TypeVar("_T")


class Replays:
    """Submits requests and calls to models. One per server. Used on the event loop.

    Models with ``replay`` switched off, and engines without a worker, are called directly: their end is the end of the
    answer. All methods raise the errors of the engine's methods, and RequestKillsWorker for work of which workers die.
    """

    def __init__(self) -> None:
        self._works: WeakKeyDictionary[ServedModel, ModelWork] = WeakKeyDictionary()

    async def submit(self, model: LoadedModel, request: EngineRequest, written: Sequence[str] = ()) -> Generation:
        """Submit a request to a model; returns when it is accepted.

        Args:
            model: the model to use.
            request: the request to answer.
            written: the texts of its prompt that the caller wrote.
        """
        place = self._place(model)
        if place is None:
            return await model.engine.submit(request)
        generation = ReplayedGeneration(request, place, model.settings.replay_timeout_s, written)
        place.add(model, generation)
        try:
            await generation.enter()
        except BaseException:
            generation.cancel()
            raise
        return generation

    async def tokenize(
        self,
        model: LoadedModel,
        segments: Sequence[Segment],
        caller: str,
        *,
        add_special: bool = False,
        written: Sequence[str] | None = None,
    ) -> Sequence[int]:
        """Return the token ids of a prompt; ``written`` defaults to the whole prompt."""
        request = EngineRequest(request_id="", segments=tuple(segments), caller=caller)
        if written is None:
            written = tuple(segment.text for segment in segments)
        return await self._ask(
            model, request, lambda engine, **how: engine.tokenize(segments, add_special, **how), written
        )

    async def pieces(self, model: LoadedModel, token_ids: Sequence[int], caller: str) -> list[bytes]:
        """Return the bytes of each token id."""
        request = EngineRequest(request_id="", token_ids=tuple(token_ids), caller=caller)
        return await self._ask(model, request, lambda engine, **how: engine.pieces(token_ids, **how))

    async def detokenize(self, model: LoadedModel, token_ids: Sequence[int], caller: str) -> str:
        """Return the text of token ids."""
        request = EngineRequest(request_id="", token_ids=tuple(token_ids), caller=caller)
        return await self._ask(model, request, lambda engine, **how: engine.detokenize(token_ids, **how))

    async def view(self, model: LoadedModel, caller: str) -> EngineView | None:
        """Return a snapshot of the engine; None if the engine provides none."""
        if not isinstance(model.engine, Inspectable):
            return None
        request = EngineRequest(request_id="", caller=caller)
        return await self._ask(model, request, lambda engine, **how: engine.view(**how))

    async def _ask(self, model: LoadedModel, request: EngineRequest, ask: Ask[_T], written: Sequence[str] = ()) -> _T:
        place = self._place(model)
        if place is None:
            return await ask(model.engine)
        question = Question(ask, place, request, model.settings.replay_timeout_s, written)
        place.add(model, question)
        return await question.answer()

    def _place(self, model: LoadedModel) -> ModelWork | None:
        """Return the work of a model; None if replay does not apply to it."""
        if not model.settings.replay or not isinstance(model.engine, WorkerEngine):
            return None
        place = self._works.get(model.served)
        if place is None:
            place = self._works[model.served] = ModelWork(model.served)
        return place
