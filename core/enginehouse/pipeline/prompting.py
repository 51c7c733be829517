"""Prompt construction: chat plan and rendered template, the client's own text or token ids, or a text around a gap.

Models trained to fill a gap have control tokens that mark the text before it and the text after it. When a model is
loaded, its template is tried, and renders the example chats from which parsers derive formats. Called by the pipeline.
Does not know parameters or the internals of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from msgspec.structs import replace

from enginehouse.contract.errors import (
    InvalidRequest,
    ModelLoadError,
    RenderError,
    ServerOverloaded,
    UnsupportedParameter,
)
from enginehouse.contract.parsers import EXAMPLES, ChatFormat, Example
from enginehouse.contract.types import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    GenerateRequest,
    Message,
    ModelInfo,
    ReasoningParams,
    Segment,
)
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.pipeline.chat_formats import ChatFormats, ChatPlan, plan_chat
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt, ModelTemplates
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.recovery import Recovery
from enginehouse.serving import LoadedModel
from enginehouse.serving.background import run_in_thread, run_with_plugins
from enginehouse.settings.config import ModelSettings

_TIMEOUT_S = 10.0  # all examples; a usual template takes some milliseconds for each


async def render_examples(renderer: Renderer, template: str, info: ModelInfo) -> ChatFormat:
    """Return the template with the texts that it writes; examples that it refuses are left out."""
    examples: dict[str, str] = {}
    failures: dict[str, str] = {}
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            for name, example in EXAMPLES.items():
                try:
                    segments = await renderer.render(_prompt(template, example, info))
                except (RenderError, InvalidRequest) as error:
                    failures[name] = error.message
                else:
                    examples[name] = "".join(segment.text for segment in segments)
    except (TimeoutError, ServerOverloaded) as error:
        failures.setdefault("", f"examples were not rendered: {error or 'they took too long'}")
    return ChatFormat(template, info.special_tokens, examples, failures)


def _prompt(template: str, example: Example, info: ModelInfo) -> ChatPrompt:
    tools = [tool.definition for tool in example.tools]
    return ChatPrompt.of(
        info,
        template,
        example.messages,
        add_generation_prompt=example.opens,
        continues=False,
        extra={**example.variables, **({"tools": tools} if tools else {})},
    )


NO_INFILL = "this model does not support infill: its vocabulary has no tokens that mark prefix, suffix and middle"
"""Reason given when ``suffix`` is refused."""


@frozen
class InfillTokens:
    """Control tokens around the two texts.

    Attributes:
        prefix: precedes the text before the gap.
        suffix: precedes the text after the gap.
        middle: ends the prompt; "" for models that do not need it, where the text after the gap comes first.
    """

    prefix: str
    suffix: str
    middle: str

    def __iter__(self) -> Iterator[str]:
        return (token for token in (self.prefix, self.suffix, self.middle) if token)


_KNOWN = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001 - characters of its own
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
"""Known forms by model family. Source: their model cards and tokenizers."""


def find_infill_tokens(info: ModelInfo) -> InfillTokens | None:
    """Return the tokens given in the model's file, else the first known form in its vocabulary; None without any."""
    if len(info.infill_tokens) == 3:
        return InfillTokens(*info.infill_tokens)
    special: Collection[str] = info.special_tokens
    return next((tokens for tokens in _KNOWN if all(token in special for token in tokens)), None)


def infill_segments(info: ModelInfo, before: str, after: str) -> tuple[Segment, ...]:
    """Return the prompt; the two texts never become control tokens.

    Raises:
        UnsupportedParameter: the model has no tokens for it.
    """
    tokens = find_infill_tokens(info)
    if tokens is None:
        raise UnsupportedParameter(f"suffix: {NO_INFILL}", "suffix")
    parts = [Segment(tokens.prefix, trusted=True), Segment(before)]
    suffix = [Segment(tokens.suffix, trusted=True), Segment(after)]
    ordered = [*parts, *suffix, Segment(tokens.middle, trusted=True)] if tokens.middle else [*suffix, *parts]
    return tuple(segment for segment in ordered if segment.text)


@frozen(eq=False, kw_only=True)
class Prompt:
    """Model input for a request. Valid while the model is loaded.

    Attributes:
        token_ids: of a prompt given as ids; ``segments`` is empty then.
        add_special: prepend the model's usual special tokens.
        written: the texts in the prompt that its caller wrote.
        plan: plan of a chat; None for a raw prompt, and where the engine takes messages.
        reasoning: reasoning parameters for the engine.
        render_s: seconds spent in the chat template.
        unsupported: parameters that were dropped because the model cannot honour them.
    """

    model: LoadedModel
    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...] | None
    add_special: bool
    written: tuple[str, ...] = ()
    plan: ChatPlan | None = None
    reasoning: ReasoningParams | None = None
    render_s: float = 0.0
    unsupported: tuple[str, ...] = ()

    async def tokenize(self, recovery: Recovery, caller: str) -> Sequence[int]:
        """Return the token ids that a forward pass would get."""
        if self.token_ids is not None:
            return self.token_ids
        return await recovery.tokenize(
            self.model, self.segments, caller, add_special=self.add_special, written=self.written
        )

    @property
    def parsing(self) -> AnswerParsing:
        """Parser configuration for the answers."""
        return self.plan.parsing(self.reasoning) if self.plan is not None else AnswerParsing()


class PromptMaker:
    """Builds the prompts of all models.

    Args:
        models: model settings by name.
        formats: chooses parsers.
        templates: the chat templates.
        renderer: renders them.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSettings],
        formats: ChatFormats,
        templates: ModelTemplates,
        renderer: Renderer,
    ) -> None:
        self._models = models
        self._formats = formats
        self._templates = templates
        self._renderer = renderer

    async def make(self, request: GenerateRequest, model: LoadedModel) -> Prompt:
        """Build the prompt of a request.

        Raises:
            RequestError: no prompt for this model can be built from the request.
        """
        if request.token_ids is not None:
            _check_token_ids(request.token_ids, model.info.vocab_size)
        if request.messages is None or model.info.engine.takes_messages:
            return Prompt(
                model=model,
                segments=_raw_segments(request, model.info),
                token_ids=request.token_ids,
                add_special=request.text is not None,
                written=_written(request),
            )
        template = self._templates.choose(model.name, model.info, with_tools=_offers_tools(request))
        chat = ChatFormat(template, model.info.special_tokens)
        formats = await self._formats.find(model.name, chat)
        if formats.are_foreign:
            plan = await run_with_plugins(True, lambda: plan_chat(request, formats, request.constraint))
        else:  # tools are serialised for prompt and constraint, which takes about 20 ms per megabyte
            plan = await run_in_thread(request.is_large, lambda: plan_chat(request, formats, request.constraint))
        began = time.perf_counter()
        rendered = await self._render(template, plan, model.info, request)
        render_s = time.perf_counter() - began
        segments, reasoning = await run_with_plugins(plan.are_foreign, lambda: _opened(plan, rendered))
        return Prompt(
            model=model,
            segments=segments,
            token_ids=None,
            add_special=False,
            written=_written(request),
            plan=plan,
            reasoning=reasoning,
            render_s=render_s,
        )

    async def check_model(self, name: str, info: ModelInfo) -> None:
        """Refuse a model whose chat templates cannot be compiled, at load time instead of on every request.

        Raises:
            ModelLoadError: names the template and the position of the error, or the setting that cannot have any
                effect.
        """
        if info.engine.takes_messages:
            _check_leaves_chats_alone(name, self._models[name])
        for template_name, template in self._templates.all(name, info).items():
            try:
                await self._renderer.check(template)
            except RenderError as error:
                message = f"its chat template {template_name!r} is broken: {error.message}"
                raise ModelLoadError(f"{message} (set chat_template to a file to use another one)") from error
            self._formats.learn(name, await render_examples(self._renderer, template, info))

    async def try_templates(self, name: str, info: ModelInfo) -> list[str]:
        """Return problems of templates that no chat, or no image, can use; the model may still serve other requests."""
        problems = []
        for template_name, template in self._templates.all(name, info).items() if info.task == "generate" else ():
            if problem := await find_template_problem(self._renderer, template, info):
                problems.append(
                    f"no chat can use its chat template {template_name!r} (set chat_template to a file to use another "
                    f"one): {problem}"
                )
            elif "image" in info.engine.media and (problem := await find_image_problem(self._renderer, template, info)):
                problems.append(f"chats with images cannot use its chat template {template_name!r}: {problem}")
        return problems

    async def _render(
        self, template: str, plan: ChatPlan, info: ModelInfo, request: GenerateRequest
    ) -> tuple[Segment, ...]:
        media = {one.param: one for one in _media(plan.messages)}
        for one in _media(request.messages or ()):
            if one.param not in media:
                message = f"{one.param}: the tool parser of this model does not keep media of such messages"
                raise UnsupportedParameter(message, one.param)
        prompt = ChatPrompt.of(
            info,
            template,
            _without_data(plan.messages) if media else plan.messages,
            continues=request.continues,
            add_generation_prompt=request.opens_turn,
            extra=plan.variables,
        )
        segments = await self._renderer.render(prompt)
        if not media:
            return segments
        return tuple(
            segment if segment.media is None else replace(segment, media=media[segment.media.param])
            for segment in segments
        )


def _media(messages: Sequence[Message]) -> list[DecodedMedia]:
    return [part for one in messages for part in one.parts if isinstance(part, DecodedImage | DecodedAudio)]


def _without_data(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages whose media are empty, since a template needs only their places."""
    return tuple(evolve(one, parts=tuple(map(_emptied, one.parts))) for one in messages)


def _emptied(part: Any) -> Any:
    return part.with_data(b"") if isinstance(part, DecodedImage | DecodedAudio) else part


def _offers_tools(request: GenerateRequest) -> bool:
    """Return True if the model is shown tools; a template made for them may not work without."""
    return request.tool_use is not None and bool(request.tool_use.callable)


def _opened(plan: ChatPlan, rendered: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], ReasoningParams | None]:
    """Return the whole prompt, and the reasoning parameters for the engine."""
    segments = plan.opened(rendered)
    return segments, plan.reasoning_params(segments)


def _written(request: GenerateRequest) -> tuple[str, ...]:
    """Return the caller's own texts in a prompt: contents, arguments, tool names and template variable names."""
    written = [request.text, request.suffix]
    for message in request.messages or ():
        written += [message.content, message.reasoning, *(call.arguments for call in message.tool_calls)]
    if request.tool_use is not None:
        written += [tool.name for tool in request.tool_use.tools]
    return tuple(text for text in (*written, *request.template_variables) if text)


def _raw_segments(request: GenerateRequest, info: ModelInfo) -> tuple[Segment, ...]:
    """Return the segments of a raw text; empty for token ids, and for messages that the engine renders itself."""
    if request.text is None:
        return ()
    if request.suffix is not None:
        return infill_segments(info, request.text, request.suffix)
    # A raw prompt is the client's own: control-token strings in it are control tokens.
    return (Segment(request.text, trusted=True),)


def _check_leaves_chats_alone(name: str, settings: ModelSettings) -> None:
    """Refuse settings about prompts and parsers if the engine handles chats itself."""
    for setting in ("chat_template", "tool_parser", "reasoning_parser", "compressor"):
        if getattr(settings, setting) is not None:
            path = f"models.{name}.{setting}"
            raise ModelLoadError(f"{path}: its engine renders chats and parses answers itself; remove this setting")


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    wrong = next((token_id for token_id in (min(token_ids), max(token_ids)) if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"prompt: the token id {wrong} is not in 0 to {vocab_size - 1}", "prompt")


_SLOW_S = 1.0
_USER = Message(role="user", content="Hello")
_SYSTEM = Message(role="system", content="Be brief.")
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Name."}}}
_FUNCTION = {"name": "weather", "description": "Return the weather.", "parameters": _PARAMETERS}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_CHATS: tuple[tuple[tuple[Message, ...], dict[str, Any]], ...] = (
    ((_USER,), {}),
    ((_USER,), _TOOLS),
    ((_SYSTEM, _USER), {}),
    ((_SYSTEM, _USER), _TOOLS),
)


async def find_template_problem(renderer: Renderer, template: str, info: ModelInfo) -> str:
    """Return why a template renders none of four short chats, by the first of them; "" if it renders one.

    After a chat that takes long no other is tried, as such a template costs a process each time.
    """
    problem = ""
    for messages, variables in _CHATS:
        began = asyncio.get_running_loop().time()
        prompt = ChatPrompt.of(info, template, messages, extra=variables)
        try:
            await renderer.render(prompt)
        except RenderError as error:
            problem = problem or error.message
        except ServerOverloaded:  # the processes are needed by requests
            return ""
        else:
            return ""
        if asyncio.get_running_loop().time() - began > _SLOW_S:
            break
    return problem


async def find_image_problem(renderer: Renderer, template: str, info: ModelInfo) -> str:
    """Return why a template cannot render a chat with an image; "" if it can."""
    image = DecodedImage("", 1, 1, b"", param="image")
    asked = Message(role="user", content=_USER.content, parts=(image, _USER.content))
    try:
        await renderer.render(ChatPrompt.of(info, template, (asked,)))
    except RenderError as error:
        return error.message.removeprefix("image: ")
    except ServerOverloaded:  # the processes are needed by requests
        return ""
    return ""
