"""Request pipeline: resolves the model, merges parameters, plans the chat, renders the prompt and submits it.

The API calls it with a decoded request; it can be used without HTTP. Does not know wire formats or the internals of
engines.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from attrs import evolve, frozen

from enginehouse.contract.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, UnsupportedParameter
from enginehouse.contract.types import Chat, EngineRequest, GenerateRequest, ModelInfo, Segment
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.pipeline.capabilities import Capability, check_parameters
from enginehouse.pipeline.chat_formats import ChatFormats
from enginehouse.pipeline.compressing import Compressed, PromptCompressor
from enginehouse.pipeline.media import MediaReader
from enginehouse.pipeline.model_card import ModelCard, ModelCards
from enginehouse.pipeline.model_defaults import ModelDefaults
from enginehouse.pipeline.parameters import Layer, Parameters, effective_parameters, read_defaults
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.pipeline.prompting import Prompt, PromptMaker
from enginehouse.pipeline.request_parameters import without_parameter
from enginehouse.pipeline.routing import (
    Attempts,
    OnDiscarded,
    Plan,
    Planner,
    Routed,
    TooLong,
    find_too_long,
)
from enginehouse.plugins import PluginRegistry
from enginehouse.replay import Generation, Replays
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.settings.config import Settings
from enginehouse.settings.profiles import PROFILES
from enginehouse.settings.timeouts import Timeouts, timeouts_of
from enginehouse.workers.client import WorkerEngine

__all__ = ["Pipeline", "RunningRequest"]

_T = TypeVar("_T")
_ANSWER_TOKENS = 256
"""Tokens reserved for the answer when a prompt is compressed until it fits and the request gives no limit."""


@frozen(eq=False)
class RunningRequest:
    """A request that an engine has accepted. Iterate or cancel ``generation``.

    Attributes:
        card: profile of the model.
        parsing: parser configuration for the text of its answers.
        prediction_token_ids: of the predicted answer; None without one.
        render_s: seconds spent in the chat template.
        tokenize_s: seconds from then until the engine had tokenized and accepted it.
        unsupported: parameters that were dropped because the model cannot honour them.
        routed: routing result, where there was a choice of models.
        compressed: result of prompt compression, if attempted.
    """

    request: GenerateRequest
    model: LoadedModel
    card: ModelCard
    parameters: Parameters
    generation: Generation
    parsing: AnswerParsing
    prediction_token_ids: Sequence[int] | None = None
    render_s: float = 0.0
    tokenize_s: float = 0.0
    unsupported: tuple[str, ...] = ()
    routed: Routed | None = None
    compressed: Compressed | None = None


class Pipeline:
    """Routes each request to a model and submits it. Used on one event loop.

    Args:
        replays: of an earlier pipeline whose requests may still run; None creates new ones.

    Raises:
        ConfigError: the defaults of a model are wrong, its parsers or its compressor do not exist, its chat template
            file cannot be read, or there is no such router.
    """

    def __init__(
        self,
        settings: Settings,
        registry: PluginRegistry,
        manager: ModelManager,
        renderer: Renderer,
        replays: Replays | None = None,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._samplers = registry.samplers
        self._defaults = ModelDefaults(settings.models, registry.samplers)
        self._profiles = {
            name: Layer("profile", read_defaults(profile.defaults, f"profile {name}", registry.samplers))
            for name, profile in PROFILES.items()
        }
        templates, formats = ModelTemplates(settings.models), ChatFormats(registry, settings.models)
        self._prompts = PromptMaker(settings.models, formats, templates, renderer)
        self._cards = ModelCards(registry, formats, templates)
        self.replays = replays if replays is not None else Replays()
        self._compressor = PromptCompressor(settings.models, registry.compressors, manager, self.replays)
        self._media = MediaReader(settings.media)
        self._planner = Planner(settings, registry.routers, manager, self._capabilities_of)
        self._leaves_out = settings.server.unsupported_parameters == "report"

    def _capabilities_of(self, name: str, info: ModelInfo) -> Mapping[str, Capability]:
        return self.card(name, info).capabilities

    def card(self, name: str, info: ModelInfo) -> ModelCard:
        """Return the profile of a model that was opened."""
        return self._cards.of(name, info)

    def defaults(self, asked: str, name: str, info: ModelInfo, profile: str) -> Parameters:
        """Return the parameters that apply to a request by the name ``asked`` in ``profile`` that gives none itself."""
        request = GenerateRequest(request_id="", model=asked, profile=profile)
        layers = self._layers(request, name, info)
        return effective_parameters(request, layers, info.vocab_size, self._settings.limits, self._samplers)

    async def submit(
        self, request: GenerateRequest, on_discarded: OnDiscarded = lambda num_tokens: None
    ) -> RunningRequest:
        """Submit a request to its engine; return when it is accepted, before any token is generated.

        Parameters that the model cannot honour are dropped if the settings allow it.

        Args:
            on_discarded: called with the number of tokens that were computed but are not part of any answer, also on
                errors.

        Raises:
            RequestError: the request cannot be served as asked.
            Overloaded: too many requests wait.
            EngineError: the model is not ready or its engine died.
        """
        running, unsupported = await self._leaving_out(request, lambda attempt: self._route(attempt, on_discarded))
        return evolve(running, unsupported=unsupported) if unsupported else running

    def is_routed(self, asked: str | None) -> bool:
        """True if a router chooses the model for requests by that name."""
        return self._planner.is_routed(asked)

    def usual_model(self, asked: str | None) -> str | None:
        """Return the most likely model for requests by that name: where a router chooses, its default."""
        return self._planner.default if self.is_routed(asked) else asked

    async def plan(self, request: GenerateRequest) -> tuple[Plan | None, tuple[str, ...]]:
        """Return the models that :meth:`submit` would try, or None without a choice, and the parameters it would drop.

        Raises:
            RequestError: no model could serve the request.
        """

        async def plan(attempt: GenerateRequest) -> Plan | None:
            return self._planner.plan(attempt, await self._too_long(attempt))

        return await self._leaving_out(request, plan)

    async def _route(self, request: GenerateRequest, on_discarded: OnDiscarded) -> RunningRequest:
        """Submit to the requested model, or to the first of several that begins an answer."""
        # A named model reports by itself that it cannot hold a prompt.
        too_long = await self._too_long(request) if self.is_routed(request.model) else {}
        plan = self._planner.plan(request, too_long)
        if plan is None:
            return await self._submit(request, request.model)
        attempts = Attempts(plan, request, self._submit, self._planner.experience, on_discarded)
        running, routed = await attempts.run()
        return evolve(running, routed=routed)

    async def _too_long(self, request: GenerateRequest) -> TooLong:
        """Return the candidate models whose context cannot hold the prompt."""

        async def count(request: GenerateRequest, model: LoadedModel) -> int:
            prompt = await self._prompts.make(request, model)
            return len(await prompt.tokenize(self.replays, request.caller))

        return await find_too_long(request, self._planner.named_by(request), self._manager, count)

    async def _submit(self, request: GenerateRequest, model: str | None) -> RunningRequest:
        lease = await self._manager.lease(model)
        try:
            with lease.explaining():
                running = await self._submit_to(lease.model, request)
        except BaseException:
            lease.release()
            raise
        running.generation.keep(lease)
        return running

    async def _submit_to(self, model: LoadedModel, request: GenerateRequest) -> RunningRequest:
        if model.name not in self._settings.models:
            raise ModelNotFound(model.name)  # it was added after this request arrived
        timeouts = timeouts_of(self._settings.limits, model.settings)
        backlog = model.engine.backlog if isinstance(model.engine, WorkerEngine) else None  # others have their own
        if backlog is not None:
            backlog.check(request.caller, request.priority, timeouts.queue_s)
            backlog.enter(request.request_id, request.caller, request.priority)
        try:
            return await self._prepare_and_submit(model, request, timeouts)
        except BaseException:
            if backlog is not None:
                backlog.leave(request.request_id)
            raise

    async def _prepare_and_submit(
        self, model: LoadedModel, request: GenerateRequest, timeouts: Timeouts
    ) -> RunningRequest:
        card = self._cards.of(model.name, model.info)
        check_parameters(request, card.capabilities)
        layers = self._layers(request, model.name, model.info)
        parameters = effective_parameters(request, layers, model.info.vocab_size, self._settings.limits, self._samplers)
        prediction = await self._prediction(request, model)

        async def submit(request: GenerateRequest, compressed: Compressed | None) -> RunningRequest:
            return await self._render_and_submit(
                model, request, parameters, timeouts=timeouts, prediction=prediction, compressed=compressed
            )

        try:
            return await submit(*await self._compressor.compress(request, model))
        except ContextLengthExceeded as error:
            room = error.max_context - min(parameters.stopping.max_tokens or _ANSWER_TOKENS, error.max_context // 4)
            shorter, compressed = await self._compressor.make_room(request, model, error.num_prompt_tokens - room)
            if shorter is request:
                raise
            return await submit(shorter, compressed)

    async def _render_and_submit(
        self,
        model: LoadedModel,
        request: GenerateRequest,
        parameters: Parameters,
        *,
        timeouts: Timeouts,
        prediction: Sequence[int] | None,
        compressed: Compressed | None,
    ) -> RunningRequest:
        request = await self._with_media(request, model)
        prompt = await self._prompts.make(request, model)
        rendered = time.perf_counter()
        engine_request = _engine_request(request, parameters, prompt, timeouts, prediction)
        try:
            generation = await self.replays.submit(model, engine_request, prompt.written)
        except ContextLengthExceeded as error:
            # The engine does not know in which field the client wrote the prompt.
            param = "prompt" if request.messages is None else "messages"
            raise ContextLengthExceeded(
                error.num_prompt_tokens, error.max_context, param, is_lower_bound=error.is_lower_bound
            ) from error
        return RunningRequest(
            request,
            model,
            self._cards.of(model.name, model.info),
            parameters,
            generation,
            prompt.parsing,
            prediction_token_ids=prediction,
            render_s=prompt.render_s,
            tokenize_s=time.perf_counter() - rendered,
            compressed=compressed,
        )

    async def _leaving_out(
        self, request: GenerateRequest, attempt: Callable[[GenerateRequest], Awaitable[_T]]
    ) -> tuple[_T, tuple[str, ...]]:
        """Run ``attempt``, dropping unsupported parameters if allowed; return its result and the dropped parameters."""
        unsupported: list[str] = []
        while True:
            try:
                return await attempt(request), tuple(unsupported)
            except UnsupportedParameter as error:
                left = without_parameter(request, error.param or "") if self._leaves_out else None
                if left is None:
                    raise
                request, param = left
                unsupported.append(param)

    async def _prediction(self, request: GenerateRequest, model: LoadedModel) -> Sequence[int] | None:
        """Return the tokens of a request's predicted answer; control-token strings in it are ordinary text.

        Raises:
            InvalidRequest: there are more than any answer of this model could have.
        """
        if not request.prediction:
            return None if request.prediction is None else ()
        token_ids = await self.replays.tokenize(model, (Segment(request.prediction),), request.caller)
        if len(token_ids) > (most := model.info.max_context):
            raise InvalidRequest(f"prediction: must have at most {most} tokens, not {len(token_ids)}", "prediction")
        return token_ids

    async def prompt(self, request: GenerateRequest, model: LoadedModel) -> Prompt:
        """Return the prompt that :meth:`submit` would build for ``model``, without submitting it.

        Raises:
            RequestError: no prompt can be built from the request.
        """
        prompt, unsupported = await self._leaving_out(request, lambda attempt: self._prompt(attempt, model))
        return evolve(prompt, unsupported=unsupported) if unsupported else prompt

    async def _prompt(self, request: GenerateRequest, model: LoadedModel) -> Prompt:
        if model.name not in self._settings.models:
            raise ModelNotFound(model.name)
        if request.messages is not None and model.info.engine.takes_messages:
            message = "messages: this model's engine renders chats itself; its prompts cannot be shown here"
            raise UnsupportedParameter(message, "messages")
        return await self._prompts.make(await self._with_media(request, model), model)

    async def _with_media(self, request: GenerateRequest, model: LoadedModel) -> GenerateRequest:
        """Return the request with the non-text parts of its messages read and checked."""
        if not any(message.parts for message in request.messages or ()):
            return request
        return evolve(request, messages=await self._media.read(request.messages or (), model.info.engine))

    async def check_model(self, name: str, info: ModelInfo) -> None:
        """Refuse a model that could not serve any chat, at load time instead of on every request.

        Raises:
            ModelLoadError: gives the reason.
        """
        await self._prompts.check_model(name, info)

    def _layers(self, request: GenerateRequest, name: str, info: ModelInfo) -> tuple[Layer, ...]:
        """Return the defaults that apply, highest priority first."""
        of_model = self._defaults.layers(name, info, request.model)
        return (*of_model, self._profiles[request.profile])


def _engine_request(
    request: GenerateRequest,
    parameters: Parameters,
    prompt: Prompt,
    timeouts: Timeouts,
    prediction: Sequence[int] | None,
) -> EngineRequest:
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
        prediction_token_ids=tuple(prediction or ()),
        priority=request.priority,
        namespace=request.namespace,
        cache_prompt=request.cache_prompt,
        caller=request.caller,
        queue_timeout_s=timeouts.queue_s,
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
