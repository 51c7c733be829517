"""Preparation of a request: preparers of plugins change it, and the result is ready to start on a model.

A preparer's questions to models go through recovery like requests, so text that kills workers is found and refused.
Does not know what preparers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from attrs import frozen

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.engine import EngineStream, Placement, placement_of
from enginehouse.contract.errors import ConfigError, ModelNotReady, UnsupportedTask
from enginehouse.contract.preparer import BoundPreparer, ModelAccess, Report
from enginehouse.contract.types import (
    Chat,
    EngineRequest,
    Event,
    GenerateRequest,
    PoolingRequest,
    PoolingResult,
    Segment,
)
from enginehouse.pipeline.model_profile import ModelProfile
from enginehouse.pipeline.parameters import Parameters
from enginehouse.pipeline.prompting import Prompt
from enginehouse.plugins import PluginRegistry, guard_of
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.threads import CoreLoop
from enginehouse.recovery import Recovery
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.settings.config import ModelSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.fleet import FleetEngine

Reports: TypeAlias = Mapping[str, Report | None]
"""Name of each preparer to its report; None if it left the request unchanged."""


class Preparers:
    """All preparers of a server, bound to the settings of its models.

    Raises:
        ConfigError: the settings of a model cannot be applied.
    """

    def __init__(
        self, models: Mapping[str, ModelSettings], registry: PluginRegistry, manager: ModelManager, recovery: Recovery
    ) -> None:
        settings = {name: model.compressor for name, model in models.items()}
        objects = {name: getattr(registry, name) for name in KINDS}
        self._bound: dict[str, BoundPreparer] = {}
        for name, preparer in registry.preparers.items():
            self._bound[name] = preparer.bind(settings, objects)
        unread = next((name for name, setting in settings.items() if setting is not None), None)
        if unread is not None and "compression" not in self._bound:
            path = f"models.{unread}.compressor"
            raise ConfigError(f"{path}: the plugin 'compress' is not loaded", path)
        self._manager = manager
        self._recovery = recovery

    async def may_prepare(self, request: GenerateRequest, model: str) -> bool:
        """True if a preparer could change requests like this one to a model."""
        for preparer in self._bound.values():
            ask = partial(preparer.may_prepare, request, model)
            if await guard_of(preparer, "preparer").run("may_prepare", ask):
                return True
        return False

    async def prepare(
        self, request: GenerateRequest, model: LoadedModel, num_excess: int | None = None
    ) -> tuple[GenerateRequest, Reports]:
        """Return the request as changed by all preparers, in order of registration, and their reports.

        Args:
            num_excess: tokens that must go, after the engine found the prompt too long; None in the first call.

        Raises:
            RequestError: the request asks for something that cannot be done.
            PluginError: a preparer failed.
        """
        reports: dict[str, Report | None] = dict.fromkeys(self._bound)
        if model.info.engine.takes_messages:
            return request, reports
        access = _Access(model, self._manager, self._recovery, request.caller)
        for name, preparer in self._bound.items():
            guard = guard_of(preparer, "preparer")
            seen = access if guard.loops is None else _ForeignAccess(access, CoreLoop())
            prepare = partial(preparer.prepare_request, request, seen, num_excess)
            preparation = await guard.run_async("prepare_request", prepare)
            if preparation is not None:
                request, reports[name] = preparation.request, preparation.report
        return request, reports


@frozen
class _ForeignAccess:
    """Access from another event loop than core's; implements :class:`enginehouse.contract.preparer.ModelAccess`."""

    _access: ModelAccess
    _core: CoreLoop

    @property
    def name(self) -> str:
        return self._access.name

    @property
    def created(self) -> int:
        return self._access.created

    async def tokenize(self, text: str) -> Sequence[int]:
        return await self._core.run(lambda: self._access.tokenize(text))

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._core.run(lambda: self._access.pieces(token_ids))

    async def generate(self, request: EngineRequest) -> EngineStream:
        return _ForeignStream(await self._core.run(lambda: self._access.generate(request)), self._core)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        return await self._core.run(lambda: self._access.pool(request))

    @contextlib.asynccontextmanager
    async def other(self, name: str) -> AsyncIterator[ModelAccess]:
        async with contextlib.AsyncExitStack() as stack:
            model = self._access.other(name)
            access = await self._core.run(model.__aenter__)
            stack.push_async_exit(lambda *error: self._core.run(lambda: model.__aexit__(*error)))
            yield _ForeignAccess(access, self._core)


@frozen
class _ForeignStream:
    """A stream for another event loop than core's; implements :class:`enginehouse.contract.engine.EngineStream`."""

    _stream: EngineStream
    _core: CoreLoop

    @property
    def num_prompt_tokens(self) -> int:
        return self._stream.num_prompt_tokens

    @property
    def num_waiting_events(self) -> int:
        return self._stream.num_waiting_events

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        return self._stream.prompt_token_ids

    @property
    def placement(self) -> Placement | None:
        return placement_of(self._stream)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        async for batch in self._core.iterate(aiter(self._stream)):
            yield batch

    def cancel(self) -> None:
        self._core.call(self._stream.cancel)


@frozen
class _Access:
    """Implements :class:`enginehouse.contract.preparer.ModelAccess`."""

    _model: LoadedModel
    _manager: ModelManager
    _recovery: Recovery
    _caller: str

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def created(self) -> int:
        return self._model.created

    async def tokenize(self, text: str) -> Sequence[int]:
        return await self._recovery.tokenize(self._model, (Segment(text),), self._caller)

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._recovery.pieces(self._model, token_ids, self._caller)

    async def generate(self, request: EngineRequest) -> EngineStream:
        # Part of a request that has a place in the queue, so it is not refused for want of one.
        engine = self._model.engine
        if not isinstance(engine, WorkerEngine | FleetEngine):
            return await self._recovery.start(self._model, request)
        engine.request_queue.enter(request.request_id, request.caller, request.priority)
        with contextlib.ExitStack() as undo:
            undo.callback(engine.request_queue.leave, request.request_id)
            stream = await self._recovery.start(self._model, request)
            undo.pop_all()
        return stream

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        if self._model.info.task != request.task:
            raise UnsupportedTask(self.name, self._model.info.task, request.task)
        engine = self._model.engine
        if not isinstance(engine, WorkerEngine | FleetEngine):
            return await self._recovery.pool(self._model, request)
        engine.request_queue.enter(request.request_id, request.caller, request.priority)
        try:
            return await self._recovery.pool(self._model, request)
        finally:
            engine.request_queue.leave(request.request_id)

    @contextlib.asynccontextmanager
    async def other(self, name: str) -> AsyncIterator[ModelAccess]:
        if self._manager.find(name).loaded is None:
            raise ModelNotReady(f"the model {name!r} is not loaded")
        async with self._manager.use(name) as model:
            yield _Access(model, self._manager, self._recovery, self._caller)


@frozen(eq=False, kw_only=True)
class Prepared:
    """A request that is ready to start on a model.

    Attributes:
        asked: the request without what the model does not support.
        request: the same as rendered: changed by preparers of plugins, its media read.
        model_profile: profile of the model.
        prompt: the rendered prompt.
        prediction_token_ids: of the predicted answer; None without one.
        adapters: adapters of the model that the request names.
        unsupported: parameters that were dropped because the model cannot honour them.
        reports: what preparers of plugins did to the request, by name.
    """

    asked: GenerateRequest
    request: GenerateRequest
    model: LoadedModel
    model_profile: ModelProfile
    parameters: Parameters
    prompt: Prompt
    prediction_token_ids: Sequence[int] | None = None
    adapters: tuple[Adapter, ...] = ()
    unsupported: tuple[str, ...] = ()
    reports: Reports


def engine_request(prepared: Prepared, queue_s: float | None) -> EngineRequest:
    """Return the request for the engine; ``queue_s`` is the maximum time in its queue."""
    request, parameters, prompt = prepared.request, prepared.parameters, prepared.prompt
    plan = prompt.plan
    return EngineRequest(
        request_id=request.request_id,
        chat=_chat(request) if prompt.model.info.engine.takes_messages else None,
        segments=prompt.segments,
        token_ids=prompt.token_ids,
        add_special=prompt.add_special,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_choices=request.num_choices,
        sampling=parameters.sampling,
        stopping=parameters.stopping,
        shown_tokens=plan.shown_tokens if plan is not None else (),
        reasoning=prompt.reasoning,
        constraint=plan.constraint if plan is not None else request.constraint,
        prediction_token_ids=tuple(prepared.prediction_token_ids or ()),
        namespace=request.namespace,
        adapters=prepared.adapters,
        caller=request.caller,
        queue_timeout_s=queue_s,
        **request.options(),
    )


def _chat(request: GenerateRequest) -> Chat | None:
    """Return the chat as requested; None for a raw prompt."""
    if request.messages is None:
        return None
    return Chat(
        messages=request.messages,
        tool_use=request.tool_use,
        thinking=request.thinking,
        template_variables=request.template_variables,
    )
