"""Entry point for requests and questions that survive the death of a worker; called by the pipeline.

Questions (everything but generations: pooling, tokenize, snapshots) are work items, too: asked again if the worker dies
before its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

from enginehouse.contract.engine import PoolingEngine
from enginehouse.contract.errors import EnginehouseError, InvalidRequest, WorkerDied, quoted
from enginehouse.contract.inspection import EngineView, Inspectable
from enginehouse.contract.types import EngineRequest, PoolingRequest, PoolingResult, Segment
from enginehouse.plugins import guard_of
from enginehouse.recovery.fleet_work import FleetWork
from enginehouse.recovery.generation import Generation, RecoverableRequest
from enginehouse.recovery.model_work import ModelWork
from enginehouse.recovery.work import Work
from enginehouse.serving import LoadedModel
from enginehouse.serving.served import ServedModel
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.fleet import FleetEngine

_T = TypeVar("_T")


class Question(Work):
    """A work item that is not a generation: one call to a worker.

    Args:
        model_work: the work of the called model.
        request: the caller, and the content of the call as the prompt of a request.
        timeout_s: maximum time without a worker.
        written: see :class:`Work`.
    """

    def __init__(self, model_work: ModelWork, request: EngineRequest, timeout_s: float, written: Sequence[str]) -> None:
        super().__init__(request.caller, model_work.next_arrival(), request, timeout_s, written)
        self._model_work = model_work

    async def answer(self, method: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Call a method of :class:`enginehouse.workers.client.WorkerEngine` until there is an answer.

        Raises:
            RequestKillsWorker: workers die of it.
            EngineDead: there was no worker for too long.
            EnginehouseError: any error that the engine raises.
        """
        try:
            async with self.bounded(from_now=False):
                while True:
                    engine = await self._model_work.worker_for(self)
                    try:
                        return await method(engine, *args, observer=self)
                    except WorkerDied:
                        await self._model_work.death(engine)
                    except EnginehouseError:
                        self.left()
                        raise
        finally:
            self._model_work.over(self)

    def left(self) -> None:
        """The worker has answered."""
        self._model_work.answered(self)


class PoolingQuestion(Question):
    """A pooling request: asked again if its worker dies.

    Args:
        model_work: the work of the model.
        pooling: the request.
        timeout_s: maximum time without a worker.
    """

    def __init__(self, model_work: ModelWork, pooling: PoolingRequest, timeout_s: float) -> None:
        request = EngineRequest(request_id=pooling.request_id, caller=pooling.caller, priority=pooling.priority)
        super().__init__(model_work, request, timeout_s, ())
        self._pooling = pooling

    def content(self) -> bytes:
        """Return its texts."""
        return msgspec.msgpack.encode((self._pooling.task, self._pooling.inputs))


class Recovery:
    """Starts requests and calls on models. One per server. Used on the event loop.

    Models with ``replay`` switched off, and engines without a worker, are called directly: their end is the end of the
    answer. All methods raise the errors of the engine's methods, and RequestKillsWorker for work of which workers die.
    """

    def __init__(self) -> None:
        self._works: WeakKeyDictionary[ServedModel, ModelWork] = WeakKeyDictionary()

    async def start(self, model: LoadedModel, request: EngineRequest, written: Sequence[str] = ()) -> Generation:
        """Start a request on a model; returns when it is accepted.

        Args:
            model: the model to use.
            request: the request to answer.
            written: the texts of its prompt that the caller wrote.
        """
        model_work = self._model_work(model)
        if model_work is None:
            stream = await model.engine.submit(request)
            return Generation(stream, guard=guard_of(model.engine, "backend"))
        recoverable = RecoverableRequest(request, model_work, model.settings.replay_timeout_s, written)
        model_work.add(model, recoverable)
        return Generation(await recoverable.submit(), recoverable)

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
        question = self._question(model, request, written)
        if question is None:
            return await model.engine.tokenize(segments, add_special)
        return await question.answer(WorkerEngine.tokenize, segments, add_special)

    async def pieces(self, model: LoadedModel, token_ids: Sequence[int], caller: str) -> list[bytes]:
        """Return the bytes of each token id."""
        request = EngineRequest(request_id="", token_ids=tuple(token_ids), caller=caller)
        question = self._question(model, request)
        if question is None:
            return await model.engine.pieces(token_ids)
        return await question.answer(WorkerEngine.pieces, token_ids)

    async def detokenize(self, model: LoadedModel, token_ids: Sequence[int], caller: str) -> str:
        """Return the text of token ids."""
        request = EngineRequest(request_id="", token_ids=tuple(token_ids), caller=caller)
        question = self._question(model, request)
        if question is None:
            return await model.engine.detokenize(token_ids)
        return await question.answer(WorkerEngine.detokenize, token_ids)

    async def pool(self, model: LoadedModel, request: PoolingRequest) -> PoolingResult:
        """Return the rows of a request to a pooling model."""
        if not isinstance(model.engine, PoolingEngine):
            message = f"The engine of the model {quoted(model.name)} answers no requests for the task {request.task!r}."
            raise InvalidRequest(message, "model")
        model_work = self._model_work(model)
        if model_work is None:
            return await model.engine.pool(request)
        question = PoolingQuestion(model_work, request, model.settings.replay_timeout_s)
        model_work.add(model, question)
        return await question.answer(WorkerEngine.pool, request)

    async def view(self, model: LoadedModel, caller: str) -> EngineView | None:
        """Return a snapshot of the engine; None if the engine provides none."""
        if not isinstance(model.engine, Inspectable):
            return None
        question = self._question(model, EngineRequest(request_id="", caller=caller))
        return await (model.engine.view() if question is None else question.answer(WorkerEngine.view))

    async def cached_tokens(
        self, model: LoadedModel, token_ids: Sequence[int], namespace: str, caller: str
    ) -> int | None:
        """Return how much of a prompt a namespace's prefix cache holds; None if the engine does not say."""
        if not isinstance(model.engine, Inspectable):
            return None
        question = self._question(model, EngineRequest(request_id="", token_ids=tuple(token_ids), caller=caller))
        if question is None:
            return await model.engine.cached_tokens(token_ids, namespace)
        return await question.answer(WorkerEngine.cached_tokens, token_ids, namespace)

    def _question(self, model: LoadedModel, request: EngineRequest, written: Sequence[str] = ()) -> Question | None:
        """Return a question to a model; None if replay does not apply to it."""
        model_work = self._model_work(model)
        if model_work is None:
            return None
        question = Question(model_work, request, model.settings.replay_timeout_s, written)
        model_work.add(model, question)
        return question

    def _model_work(self, model: LoadedModel) -> ModelWork | None:
        """Return the work of a model; None if replay does not apply to it."""
        if not model.settings.replay or not isinstance(model.engine, WorkerEngine | FleetEngine):
            return None
        model_work = self._works.get(model.served)
        if model_work is None:
            kind = FleetWork if isinstance(model.engine, FleetEngine) else ModelWork
            model_work = self._works[model.served] = kind(model.served)
        return model_work
