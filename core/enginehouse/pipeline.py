"""One request's way: model -> effective parameters -> chat plan -> rendered prompt -> engine -> events.

The API calls it with a decoded request; it can be used without HTTP. It knows neither wire formats nor
how engines work inside.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from attrs import evolve, frozen

from enginehouse.backend import Generation
from enginehouse.capabilities import check_parameters
from enginehouse.chat_formats import ChatFormats, ChatPlan, plan_chat
from enginehouse.config import ModelSettings, Settings
from enginehouse.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelLoadError,
    RenderError,
    UnsupportedParameter,
)
from enginehouse.model_card import ModelCard, ModelCards
from enginehouse.model_defaults import ModelDefaults
from enginehouse.models import LoadedModel, ModelManager
from enginehouse.output.answer_parser import AnswerParsing
from enginehouse.parameters import Layer, Parameters, effective_parameters, read_defaults
from enginehouse.parsers import ChatFormat
from enginehouse.plugins import PluginRegistry
from enginehouse.profiles import PROFILES
from enginehouse.prompt.chat_prompt import ChatPrompt
from enginehouse.prompt.infill import infill_segments
from enginehouse.prompt.model_templates import ModelTemplates
from enginehouse.prompt.renderer import Renderer
from enginehouse.request_parameters import without_parameter
from enginehouse.types import Chat, EngineRequest, GenerateRequest, ModelInfo, ReasoningParams, Segment

__all__ = ["Pipeline", "Prompt", "RunningRequest"]

_T = TypeVar("_T")


@frozen(eq=False)
class RunningRequest:
    """A request that an engine has accepted. Iterate or cancel ``generation``.

    Attributes:
        card: what is known about the model.
        parsing: how the text of its answers is parsed.
        prediction_token_ids: of the predicted answer; None without one.
        render_s: seconds that its chat template took.
        tokenize_s: seconds from there until the engine had tokenized and accepted it.
        unsupported: parameters that were left out, as the model cannot honour them.
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


@frozen(eq=False, kw_only=True)
class Prompt:
    """What a model is given for a request. Valid as long as the model is loaded.

    Attributes:
        token_ids: of a prompt that came as ids; there are no segments then.
        add_special: whether the model's usual special prefix goes in front.
        unsupported: parameters that were left out, as the model cannot honour them.
    """

    model: LoadedModel
    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...] | None
    add_special: bool
    unsupported: tuple[str, ...] = ()

    async def tokenize(self) -> Sequence[int]:
        """The token ids that a forward pass would get."""
        if self.token_ids is not None:
            return self.token_ids
        return await self.model.engine.tokenize(self.segments, self.add_special)


class Pipeline:
    """Leads requests to engines. Used on one event loop.

    Raises:
        ConfigError: the defaults of a model are wrong, its parsers do not exist, or its chat template file cannot
            be read.
    """

    def __init__(self, settings: Settings, registry: PluginRegistry, manager: ModelManager, renderer: Renderer) -> None:
        self._settings = settings
        self._manager = manager
        self._renderer = renderer
        self._samplers = registry.samplers
        self._defaults = ModelDefaults(settings.models, registry.samplers)
        self._profiles = {
            name: Layer("profile", read_defaults(profile.defaults, f"profile {name}", registry.samplers))
            for name, profile in PROFILES.items()
        }
        self._templates = ModelTemplates(settings.models)
        self._formats = ChatFormats(registry, settings.models)
        self._cards = ModelCards(registry, self._formats, self._templates)
        self._leaves_out = settings.server.unsupported_parameters == "report"

    def card(self, name: str, info: ModelInfo) -> ModelCard:
        """What is known about a model that was opened."""
        return self._cards.of(name, info)

    def defaults(self, asked: str, name: str, info: ModelInfo, profile: str) -> Parameters:
        """What applies to a request by the name ``asked`` in ``profile`` that gives no parameters."""
        request = GenerateRequest(request_id="", model=asked, profile=profile)
        layers = self._layers(request, name, info)
        return effective_parameters(request, layers, info.vocab_size, self._settings.limits, self._samplers)

    async def submit(self, request: GenerateRequest) -> RunningRequest:
        """Bring a request to its engine; returns when it is accepted, before any token is made.

        Where the settings say so, parameters that the model cannot honour are left out.

        Raises:
            RequestError: the request cannot be served as asked.
            Overloaded: too many requests wait.
            EngineError: the model is not ready or its engine died.
        """
        running, unsupported = await self._leaving_out(request, self._submit)
        return evolve(running, unsupported=unsupported) if unsupported else running

    async def _submit(self, request: GenerateRequest) -> RunningRequest:
        model = await self._manager.wait(request.model)
        card = self._cards.of(model.name, model.info)
        check_parameters(request, card.capabilities)
        layers = self._layers(request, model.name, model.info)
        parameters = effective_parameters(request, layers, model.info.vocab_size, self._settings.limits, self._samplers)
        if request.token_ids is not None:
            _check_token_ids(request.token_ids, model.info.vocab_size)
        prediction = await _tokenized(request.prediction, model)
        plan = self._plan(request, model)
        began = time.perf_counter()
        segments = await self._segments(request, model, plan)
        rendered = time.perf_counter()
        reasoning = plan.reasoning_params(segments) if plan is not None else None
        chat = _chat(request) if model.info.engine.takes_messages else None
        engine_request = _engine_request(request, parameters, plan, segments, reasoning, chat=chat)
        try:
            generation = await model.engine.submit(engine_request)
        except ContextLengthExceeded as error:
            # The engine does not know in which field the client wrote the prompt.
            param = "prompt" if request.messages is None else "messages"
            raise ContextLengthExceeded(error.num_prompt_tokens, error.max_context, param) from error
        parsing = plan.parsing(reasoning) if plan is not None else AnswerParsing()
        return RunningRequest(
            request,
            model,
            card,
            parameters,
            generation,
            parsing,
            prediction_token_ids=prediction,
            render_s=rendered - began if request.messages is not None else 0.0,
            tokenize_s=time.perf_counter() - rendered,
        )

    async def _leaving_out(
        self, request: GenerateRequest, attempt: Callable[[GenerateRequest], Awaitable[_T]]
    ) -> tuple[_T, tuple[str, ...]]:
        """What ``attempt`` makes of the request, perhaps without parameters that the model cannot honour; and those."""
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

    async def prompt(self, request: GenerateRequest) -> Prompt:
        """The prompt that :meth:`submit` would make of a request, without bringing it to the engine.

        Raises:
            RequestError: the request makes no prompt.
            EngineError: the model is not ready.
        """
        prompt, unsupported = await self._leaving_out(request, self._prompt)
        return evolve(prompt, unsupported=unsupported) if unsupported else prompt

    async def _prompt(self, request: GenerateRequest) -> Prompt:
        model = await self._manager.wait(request.model)
        if request.token_ids is not None:
            _check_token_ids(request.token_ids, model.info.vocab_size)
        if request.messages is not None and model.info.engine.takes_messages:
            message = "messages: this model's engine renders chats itself; its prompts cannot be shown here"
            raise UnsupportedParameter(message, "messages")
        segments = await self._segments(request, model, self._plan(request, model))
        return Prompt(model=model, segments=segments, token_ids=request.token_ids, add_special=request.text is not None)

    async def check_model(self, name: str, info: ModelInfo) -> None:
        """Refuse a model whose chat templates cannot be compiled, when it is loaded rather than on every request.

        Raises:
            ModelLoadError: says which template, and where it is wrong; or which setting cannot have any effect.
        """
        if info.engine.takes_messages:
            _check_leaves_chats_alone(name, self._settings.models[name])
        for template_name, template in self._templates.all(name, info).items():
            try:
                await self._renderer.check(template)
            except RenderError as error:
                message = f"its chat template {template_name!r} is broken: {error.message}"
                raise ModelLoadError(f"{message} (set chat_template to a file to use another one)") from error

    def _layers(self, request: GenerateRequest, name: str, info: ModelInfo) -> tuple[Layer, ...]:
        """The defaults that apply, the strongest first."""
        of_model = self._defaults.layers(name, info, request.model)
        return (*of_model, self._profiles[request.profile])

    def _plan(self, request: GenerateRequest, model: LoadedModel) -> ChatPlan | None:
        """What becomes of a chat; None for a raw prompt, and where the engine takes messages."""
        if request.messages is None or model.info.engine.takes_messages:
            return None
        chat = ChatFormat(self._template(request, model), model.info.special_tokens)
        return plan_chat(request, self._formats.of(model.name, chat), request.constraint)

    def _template(self, request: GenerateRequest, model: LoadedModel) -> str:
        return self._templates.choose(model.name, model.info, with_tools=request.tool_use is not None)

    async def _segments(
        self, request: GenerateRequest, model: LoadedModel, plan: ChatPlan | None
    ) -> tuple[Segment, ...]:
        if plan is not None:
            info = model.info
            prompt = ChatPrompt(
                template=self._template(request, model),
                messages=plan.messages,
                bos_token=info.bos_token,
                eos_token=info.eos_token,
                special_tokens=tuple(info.special_tokens),
                extra=plan.variables,
            )
            return plan.opened(await self._renderer.render(prompt))
        if request.text is not None and request.suffix is not None:
            return infill_segments(model.info, request.text, request.suffix)
        if request.text is not None:
            # A raw prompt is the client's own: control-token strings in it are control tokens.
            return (Segment(request.text, trusted=True),)
        return ()


def _engine_request(
    request: GenerateRequest,
    parameters: Parameters,
    plan: ChatPlan | None,
    segments: tuple[Segment, ...],
    reasoning: ReasoningParams | None,
    *,
    chat: Chat | None,
) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        chat=chat,
        segments=segments,
        token_ids=request.token_ids,
        add_special=request.text is not None,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_choices=request.num_choices,
        sampling=parameters.sampling,
        stopping=parameters.stopping,
        shown_tokens=plan.shown_tokens if plan is not None else (),
        reasoning=reasoning,
        constraint=plan.constraint if plan is not None else request.constraint,
        priority=request.priority,
        namespace=request.namespace,
    )


def _chat(request: GenerateRequest) -> Chat | None:
    """The chat as it was asked for; None for a raw prompt."""
    if request.messages is None:
        return None
    return Chat(
        messages=request.messages,
        tool_use=request.tool_use,
        thinking=request.thinking,
        template_variables=request.template_variables,
    )


def _check_leaves_chats_alone(name: str, settings: ModelSettings) -> None:
    """Refuse settings about templates and parsers where chats are the engine's own business."""
    for setting in ("chat_template", "tool_parser", "reasoning_parser"):
        if getattr(settings, setting) is not None:
            path = f"models.{name}.{setting}"
            raise ModelLoadError(f"{path}: its engine renders chats and parses answers itself; remove this setting")


async def _tokenized(prediction: str | None, model: LoadedModel) -> Sequence[int] | None:
    """The tokens of a predicted answer, in which control-token strings are text."""
    if prediction is None:
        return None
    return await model.engine.tokenize((Segment(prediction),), False) if prediction else ()


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"prompt: the token id {wrong} is not in 0 to {vocab_size - 1}", "prompt")
