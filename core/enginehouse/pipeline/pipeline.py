"""Request pipeline: leases a model, prepares the request for it, and starts it there.

The API calls it with a decoded request; it can be used without HTTP. Does not know wire formats or the internals of
engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from attrs import evolve, frozen

from enginehouse.contract.adapters import Adapter, cache_key
from enginehouse.contract.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueTimeout,
    UnsupportedParameter,
    UnsupportedTask,
)
from enginehouse.contract.types import GenerateRequest, ModelInfo, PoolingRequest, PoolingResult, Segment
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.pipeline.capabilities import Capability, find_unsupported, without_parameters
from enginehouse.pipeline.chat_formats import ChatFormats
from enginehouse.pipeline.media import MediaReader
from enginehouse.pipeline.model_profile import ModelDefaults, ModelProfile, ModelProfiles
from enginehouse.pipeline.parameters import Layer, Parameters, effective_parameters, read_defaults
from enginehouse.pipeline.preparing import Prepared, Preparers, Reports, engine_request
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.pipeline.prompting import Prompt, PromptMaker
from enginehouse.pipeline.routing import (
    Attempts,
    OnDiscarded,
    Plan,
    Planner,
    Routed,
    find_too_long,
)
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Generation, Recovery
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.settings.config import Settings
from enginehouse.settings.profiles import PROFILES
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.fleet import FleetEngine

_log = logging.getLogger(__name__)

_ANSWER_TOKENS = 256
"""Tokens reserved for the answer when a prompt is compressed until it fits and the request gives no limit."""


@frozen(eq=False, kw_only=True)
class RunningRequest:
    """A request that an engine has accepted. Iterate or cancel ``generation``.

    Attributes:
        model_profile: profile of the model.
        parsing: parser configuration for the text of its answers.
        prediction_token_ids: of the predicted answer; None without one.
        adapters: adapters of the model that it uses.
        load_s: seconds spent waiting for the model to be loaded.
        render_s: seconds spent in the chat template.
        tokenize_s: seconds from then until the engine had tokenized and accepted it.
        unsupported: parameters that were dropped because the model cannot honour them.
        routed: routing result, where there was a choice of models.
        reports: what preparers of plugins did to the request, by name.
    """

    request: GenerateRequest
    model: LoadedModel
    model_profile: ModelProfile
    parameters: Parameters
    generation: Generation
    parsing: AnswerParsing
    prediction_token_ids: Sequence[int] | None = None
    adapters: tuple[Adapter, ...] = ()
    load_s: float = 0.0
    render_s: float = 0.0
    tokenize_s: float = 0.0
    unsupported: tuple[str, ...] = ()
    routed: Routed | None = None
    reports: Reports

    @property
    def fingerprint(self) -> str:
        """Stamp of everything that the answer depends on besides the request; that of the model, and its adapters."""
        known = self.model_profile.fingerprint
        if not self.adapters:
            return known
        return f"{known}-{hashlib.sha256(cache_key('', self.adapters).encode()).hexdigest()[:6]}"


def _hold_nothing(num_bytes: int) -> None:
    """Let a request be computed without counting its memory."""


def _width(request: PoolingRequest, info: ModelInfo) -> int:
    """Return the numbers in a row of the result; 0 if they are not known before it is computed."""
    if request.task == "rerank":
        return 1
    if request.dimensions is not None:
        return request.dimensions
    return info.pooling.dimensions if info.pooling is not None else 0


class Pipeline:
    """Routes each request to a model and starts it there. Used on one event loop.

    Args:
        recovery: of an earlier pipeline whose requests may still run; None creates new ones.

    Raises:
        ConfigError: the defaults of a model are wrong, its parsers do not exist, its chat template file cannot be read,
            a preparer refuses its settings, or the router does not exist.
    """

    def __init__(
        self,
        settings: Settings,
        registry: PluginRegistry,
        manager: ModelManager,
        renderer: Renderer,
        recovery: Recovery | None = None,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._samplers = registry.samplers
        self._defaults = ModelDefaults(settings.models, registry.samplers, registry.absences)
        self._profiles = {
            name: Layer("profile", read_defaults(profile.defaults, f"profile {name}", registry.samplers))
            for name, profile in PROFILES.items()
        }
        templates, formats = ModelTemplates(settings.models), ChatFormats(registry, settings.models)
        self._prompts = PromptMaker(settings.models, formats, templates, renderer)
        self._model_profiles = ModelProfiles(registry, formats, templates)
        self.recovery = recovery if recovery is not None else Recovery()
        self._preparers = Preparers(settings.models, registry, manager, self.recovery)
        self._media = MediaReader(settings.media, renderer)
        self._planner = Planner(settings, registry, manager, self._capabilities_of, self.pool)
        self._leaves_out = settings.server.unsupported_parameters == "report"

    def _capabilities_of(self, name: str, info: ModelInfo) -> Mapping[str, Capability]:
        return self.model_profile(name, info).capabilities

    def model_profile(self, name: str, info: ModelInfo) -> ModelProfile:
        """Return the profile of a model that was opened."""
        return self._model_profiles.of(name, info)

    def defaults(self, asked: str, name: str, info: ModelInfo, profile: str) -> Parameters:
        """Return the parameters that apply to a request by the name ``asked`` in ``profile`` that gives none itself."""
        request = GenerateRequest(request_id="", model=asked, profile=profile)
        layers = self._layers(request, name, info)
        return effective_parameters(request, layers, info.vocab_size, self._settings.limits, self._samplers)

    async def start(
        self, request: GenerateRequest, on_discarded: OnDiscarded = lambda num_tokens: None
    ) -> RunningRequest:
        """Start a request on its engine; return when it is accepted, before any token is generated.

        Parameters that the model cannot honour are dropped if the settings allow it.

        Args:
            on_discarded: called with the number of tokens that were computed but are not part of any answer, also on
                errors.

        Raises:
            RequestError: the request cannot be served as asked.
            Overloaded: too many requests wait.
            EngineError: the model is not ready or its engine died.
        """
        request, plan, unsupported = await self._route(request)
        if plan is None:
            return await self._lease_and_start(request, request.model)
        attempts = Attempts(plan, request, self._lease_and_start, self._planner.circuit_breaker, on_discarded)
        running, routed = await attempts.run()
        return evolve(running, routed=routed, unsupported=(*unsupported, *running.unsupported))

    async def pool(self, request: PoolingRequest, hold: Callable[[int], None] = _hold_nothing) -> PoolingResult:
        """Return the rows of a request to a pooling model; cancelling this drops it.

        Args:
            hold: called with the bytes of the rows and of their text in the response: before they are computed, if
                the size of a row is known; it may raise an error, which refuses the request.

        Raises:
            RequestError: the request cannot be served as asked.
            Overloaded: too many requests wait.
            EngineError: the model is not ready or its engine died.
        """
        async with self._manager.use(request.model) as model:
            if model.name not in self._settings.models:
                raise ModelNotFound(model.name)  # it was added after this request arrived
            is_comparison = request.task == "rerank" and model.info.task == "embed" and model.settings.rerank
            if model.info.task != request.task and not is_comparison:
                raise UnsupportedTask(model.name, model.info.task, request.task, is_named=request.model is not None)
            row_bytes = (4 + request.number_bytes) * len(request.inputs)
            width = _width(request, model.info)
            hold(row_bytes * width)
            request = msgspec.structs.replace(
                request, queue_timeout_s=self._settings.timeouts(model.settings).queue_s, model=model.name
            )
            if not isinstance(model.engine, WorkerEngine | FleetEngine):  # which has a queue of its own
                result = await self.recovery.pool(model, request)
            else:
                request_queue, is_served = model.engine.request_queue, False
                request_queue.check(request.caller, request.priority, request.queue_timeout_s)
                request_queue.enter(request.request_id, request.caller, request.priority)
                try:
                    result = await self.recovery.pool(model, request)
                    is_served = True
                except QueueTimeout as error:
                    raise request_queue.explain(error, request.request_id) from error
                finally:
                    request_queue.leave(request.request_id, is_served=is_served)
            hold(row_bytes * max(0, result.width - width))
            return msgspec.structs.replace(result, model=model.name)

    def is_routed(self, asked: str | None) -> bool:
        """True if a router chooses the model for requests by that name."""
        return self._planner.is_routed(asked)

    def usual_model(self, asked: str | None) -> str | None:
        """Return the most likely model for requests by that name: where a router chooses, its default."""
        return self._planner.default if self.is_routed(asked) else asked

    async def plan(self, request: GenerateRequest) -> tuple[Plan | None, tuple[str, ...]]:
        """Return the models that :meth:`start` would try, or None without a choice, and the parameters it would drop.

        Raises:
            RequestError: no model could serve the request.
        """
        request, plan, unsupported = await self._route(request, counts_named=True)
        return plan, unsupported

    async def _route(
        self, request: GenerateRequest, *, counts_named: bool = False
    ) -> tuple[GenerateRequest, Plan | None, tuple[str, ...]]:
        """Return the request without what no candidate supports, its plan, and what was dropped.

        Args:
            counts_named: also check that the prompt fits a named model, which reports that by itself when it is tried.
        """
        unsupported: tuple[str, ...] = ()
        if self._leaves_out:
            lacking = self._planner.find_unsupported(request)
            request, unsupported = without_parameters(request, [param for param, _ in lacking])
        too_long: Mapping[str, ContextLengthExceeded] = {}
        if counts_named or self.is_routed(request.model):
            named = self._planner.named_by(request)
            names = [name for name in named if not await self._preparers.may_prepare(request, name)]
            too_long = await find_too_long(request, names, self._manager, self._count_tokens)
        return request, await self._planner.plan(request, too_long), unsupported

    async def _count_tokens(self, request: GenerateRequest, model: LoadedModel) -> int:
        prompt = await self._prompts.make(request, model)
        return len(await prompt.tokenize(self.recovery, request.caller))

    async def _lease_and_start(
        self, request: GenerateRequest, name: str | None, may_drop: bool = True
    ) -> RunningRequest:
        """Start the request on the model of that name, which stays leased until the generation has ended."""
        began = time.perf_counter()
        lease = await self._manager.lease(name)
        load_s = time.perf_counter() - began
        with contextlib.ExitStack() as undo:
            undo.callback(lease.release)
            with lease.explaining():
                running = await self._queue_and_start(lease.model, request, load_s, may_drop=may_drop)
            undo.pop_all()
        running.generation.keep(lease)
        return running

    async def _queue_and_start(
        self, model: LoadedModel, request: GenerateRequest, load_s: float, *, may_drop: bool
    ) -> RunningRequest:
        """Start the request if the model's queue has a place for it."""
        if model.name not in self._settings.models:
            raise ModelNotFound(model.name)  # it was added after this request arrived
        if model.info.task != "generate":
            raise UnsupportedTask(model.name, model.info.task, "generate", is_named=request.model is not None)
        # Engines without a worker have queues of their own.
        engine = model.engine
        request_queue = engine.request_queue if isinstance(engine, WorkerEngine | FleetEngine) else None
        queue_s = self._settings.timeouts(model.settings).queue_s
        with contextlib.ExitStack() as undo:
            if request_queue is not None:
                request_queue.check(request.caller, request.priority, queue_s)
                request_queue.enter(request.request_id, request.caller, request.priority)
                undo.callback(request_queue.leave, request.request_id)
            prepared = await self.prepare(request, model, may_drop=may_drop)
            try:
                running = await self._submit(prepared, queue_s, load_s)
            except ContextLengthExceeded as error:
                if request_queue is not None:  # the worker has refused it, so it has left
                    request_queue.enter(request.request_id, request.caller, request.priority)
                shorter = await self._shorten(prepared, error)
                if shorter is None:
                    raise
                running = await self._submit(shorter, queue_s, load_s)
            undo.pop_all()
        return running

    async def prepare(self, request: GenerateRequest, model: LoadedModel, *, may_drop: bool = True) -> Prepared:
        """Return the request as ``model`` will get it. Changes nothing.

        Args:
            may_drop: drop what the model does not support, where the settings allow it; otherwise that is refused.

        Raises:
            RequestError: the model cannot serve the request as asked.
        """
        model_profile = self._model_profiles.of(model.name, model.info)
        asked, unsupported = self._check(request, model_profile.capabilities, may_drop=may_drop)
        layers = self._layers(asked, model.name, model.info)
        of_samplers = {name: fields for name, fields in asked.extensions.items() if name in self._samplers}
        sampled = asked if of_samplers == asked.extensions else evolve(asked, extensions=of_samplers)
        parameters = effective_parameters(sampled, layers, model.info.vocab_size, self._settings.limits, self._samplers)
        adapters = self.adapters(request, model)
        prediction = await self._prediction(asked, model)
        changed, reports = await self._preparers.prepare(asked, model)
        rendered = await self._with_media(changed, model)
        return Prepared(
            asked=asked,
            request=rendered,
            model=model,
            model_profile=model_profile,
            parameters=parameters,
            prompt=await self._prompts.make(rendered, model),
            prediction_token_ids=prediction,
            adapters=adapters,
            unsupported=unsupported,
            reports=reports,
        )

    def adapters(self, request: GenerateRequest, model: LoadedModel) -> tuple[Adapter, ...]:
        """Return the adapters that the request names: in ``model``, or in a field.

        Raises:
            AdapterNotFound: the model has none of that name.
            InvalidRequest: both name one.
            UnsupportedParameter: the model takes no adapters.
        """
        named, param = self._manager.adapter_in(request.model), request.adapters_param or "adapters"
        if named is not None and request.adapters:
            message = f"{param}: not allowed together with an adapter in model ({request.model}); give one of them"
            raise InvalidRequest(message, param)
        if named is not None and model.info.engine.adapters == "none":
            raise UnsupportedParameter("model: this model takes no adapters", "model")
        asked = ((named, None),) if named is not None else request.adapters
        if not asked:
            return ()
        return model.served.adapters.resolve(model.name, asked, "model" if named is not None else param)

    def _check(
        self, request: GenerateRequest, capabilities: Mapping[str, Capability], *, may_drop: bool
    ) -> tuple[GenerateRequest, tuple[str, ...]]:
        """Return the request without what the model does not support, and what was dropped.

        Raises:
            UnsupportedParameter: a parameter is not supported and must or can not be dropped.
        """
        dropped: tuple[str, ...] = ()
        lacking = find_unsupported(request, capabilities)
        if lacking and may_drop and self._leaves_out:
            request, dropped = without_parameters(request, [param for param, _ in lacking])
            lacking = find_unsupported(request, capabilities)
        for param, reason in lacking:
            raise UnsupportedParameter(f"{param}: {reason}", param)
        return request, dropped

    async def _shorten(self, prepared: Prepared, error: ContextLengthExceeded) -> Prepared | None:
        """Return the request with a shorter prompt, after its engine refused the whole one; None if it may not be."""
        answer = prepared.parameters.stopping.max_tokens or _ANSWER_TOKENS
        room = error.max_context - min(answer, error.max_context // 4)
        num_excess = error.num_prompt_tokens - room
        shorter, reports = await self._preparers.prepare(prepared.asked, prepared.model, num_excess)
        if shorter is prepared.asked:
            return None
        rendered = await self._with_media(shorter, prepared.model)
        prompt = await self._prompts.make(rendered, prepared.model)
        return evolve(prepared, request=rendered, prompt=prompt, reports=reports)

    async def _submit(self, prepared: Prepared, queue_s: float | None, load_s: float) -> RunningRequest:
        began, request, prompt = time.perf_counter(), prepared.request, prepared.prompt
        try:
            generation = await self.recovery.start(prepared.model, engine_request(prepared, queue_s), prompt.written)
        except ContextLengthExceeded as error:
            # The engine does not know in which field the client wrote the prompt.
            param = "prompt" if request.messages is None else "messages"
            raise ContextLengthExceeded(
                error.num_prompt_tokens, error.max_context, param, is_lower_bound=error.is_lower_bound
            ) from error
        return RunningRequest(
            request=request,
            model=prepared.model,
            model_profile=prepared.model_profile,
            parameters=prepared.parameters,
            generation=generation,
            parsing=prompt.parsing,
            prediction_token_ids=prepared.prediction_token_ids,
            adapters=prepared.adapters,
            load_s=load_s,
            render_s=prompt.render_s,
            tokenize_s=time.perf_counter() - began,
            unsupported=prepared.unsupported,
            reports=prepared.reports,
        )

    async def _prediction(self, request: GenerateRequest, model: LoadedModel) -> Sequence[int] | None:
        """Return the tokens of a request's predicted answer; control-token strings in it are ordinary text.

        Raises:
            InvalidRequest: there are more than any answer of this model could have.
        """
        if not request.prediction:
            return None if request.prediction is None else ()
        token_ids = await self.recovery.tokenize(model, (Segment(request.prediction),), request.caller)
        if len(token_ids) > (most := model.info.max_context):
            raise InvalidRequest(f"prediction: must have at most {most} tokens, not {len(token_ids)}", "prediction")
        return token_ids

    async def preview(self, request: GenerateRequest) -> Prepared:
        """Return the request as :meth:`start` would submit it to the model that it names, without submitting it.

        Raises:
            RequestError: the model cannot serve the request as asked, or it does not fit its context.
        """
        async with self._manager.use(request.model) as model:
            if model.name not in self._settings.models:
                raise ModelNotFound(model.name)
            if model.info.task != "generate":
                raise UnsupportedTask(model.name, model.info.task, "generate", is_named=request.model is not None)
            prepared = await self.prepare(request, model)
            if model.info.engine.takes_messages:
                return prepared
            num_tokens = len(await prepared.prompt.tokenize(self.recovery, request.caller))
            if num_tokens < (max_context := model.info.max_context):
                return prepared
            param = "prompt" if request.messages is None else "messages"
            error = ContextLengthExceeded(num_tokens, max_context, param)
            shorter = await self._shorten(prepared, error)
            if shorter is None:
                raise error
            return shorter

    async def prompt(self, request: GenerateRequest, model: LoadedModel) -> Prompt:
        """Return the prompt that :meth:`start` would build for ``model``, without starting it.

        Raises:
            RequestError: no prompt can be built from the request.
        """
        if model.name not in self._settings.models:
            raise ModelNotFound(model.name)
        if request.messages is not None and model.info.engine.takes_messages:
            message = "messages: this model's engine renders chats itself; its prompts are neither shown nor counted"
            raise UnsupportedParameter(message, "messages")
        unsupported: tuple[str, ...] = ()
        if self._leaves_out:
            shaping = evolve(request, sampling={}, stopping={}, extensions={})
            lacking = find_unsupported(shaping, self.model_profile(model.name, model.info).capabilities)
            request, unsupported = without_parameters(request, [param for param, _ in lacking])
        prompt = await self._prompts.make(await self._with_media(request, model), model)
        return evolve(prompt, unsupported=unsupported)

    async def _with_media(self, request: GenerateRequest, model: LoadedModel) -> GenerateRequest:
        """Return the request with the non-text parts of its messages read and checked."""
        if not any(message.parts for message in request.messages or ()):
            return request
        messages = await self._media.read(request.messages or (), model.info.engine, request.hold)
        return evolve(request, messages=messages)

    async def check_model(self, name: str, info: ModelInfo) -> None:
        """Refuse a model that could not serve any chat, at load time instead of on every request.

        Raises:
            ModelLoadError: gives the reason.
        """
        await self._prompts.check_model(name, info)
        for problem in await self._prompts.try_templates(name, info):
            _log.warning("models.%s: %s", name, problem)
        await self.prepare_profile(name, info)

    async def prepare_profile(self, name: str, info: ModelInfo) -> None:
        """Ask the parsers about a loaded model, so that :meth:`model_profile` need not wait for them."""
        await self._model_profiles.prepare(name, info)

    def _layers(self, request: GenerateRequest, name: str, info: ModelInfo) -> tuple[Layer, ...]:
        """Return the defaults that apply, highest priority first."""
        of_model = self._defaults.layers(name, info, request.model)
        return (*of_model, self._profiles[request.profile])
