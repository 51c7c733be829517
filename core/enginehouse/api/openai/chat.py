"""``POST /v1/chat/completions``: its body and its handler."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, le, optional
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from enginehouse.api.http.body import KEEPS_NULLS, read_body
from enginehouse.api.http.callers import caller_of
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.answer import Assembly, Dialect
from enginehouse.api.openai.chat_dialect import ChatDialect, ChatOptions, HeldUsage
from enginehouse.api.openai.decoding import BodyDecoder, GenerationBody
from enginehouse.api.openai.generation import GenerationResponse
from enginehouse.api.openai.messages import MessageBody, find_ignored_in_messages, read_messages
from enginehouse.api.openai.prediction import check_prediction, find_ignored_in_prediction, read_prediction
from enginehouse.api.openai.raw_prompt import TEMPLATE_FIELDS, check_raw_prompt
from enginehouse.api.openai.tools import (
    MAX_TOOLS,
    Effort,
    ToolBody,
    check_template_variables,
    find_ignored_in_choice,
    find_ignored_in_tools,
    read_thinking,
    read_tool_use,
)
from enginehouse.contract.errors import InvalidRequest
from enginehouse.pipeline.parameters import INT64_MAX
from enginehouse.serving.background import aside
from enginehouse.settings.config import LimitsSettings

__all__ = ["ChatBody", "chat_route"]


@frozen(kw_only=True)
class ChatBody(GenerationBody):
    """The request body.

    Attributes:
        messages: the chat; either this or ``prompt``.
        prompt: raw text without a chat template, instead of ``messages``.
        max_completion_tokens: another name of ``max_tokens``.
        tool_choice: ``none``, ``auto``, ``required``, or an object that names a function.
        enable_thinking: enable or disable reasoning, for models that support both.
        thinking_budget: maximum tokens of reasoning; 0 means no reasoning, -1 no limit.
        chat_template_kwargs: further variables of the chat template.
        prediction: the predicted output; the usage counts the part of it that was generated.
    """

    messages: tuple[MessageBody, ...] | None = None
    prompt: str | None = None
    max_completion_tokens: int | None = field(default=None, validator=optional([ge(1), le(INT64_MAX)]))
    logprobs: bool = False
    top_logprobs: int | None = field(default=None, validator=optional([ge(0), le(20)]))
    tools: tuple[ToolBody, ...] = field(default=(), metadata=KEEPS_NULLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = field(default=None, validator=optional([ge(-1), le(2**31 - 1)]))
    chat_template_kwargs: dict[str, Any] = field(factory=dict, metadata=KEEPS_NULLS)
    prediction: Any = None

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        self.check_prompt()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        if self.token_details and not self.logprobs:
            raise InvalidRequest("token_details: only allowed when logprobs is true", "token_details")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) differ"
            raise InvalidRequest(f"{message}; give one of them", "max_completion_tokens")
        asked, most = self.max_completion_tokens, limits.max_tokens
        if asked is not None and most is not None and asked > most:
            message = f"this server allows at most {most}, not {asked}"
            raise InvalidRequest(f"max_completion_tokens: {message}", "max_completion_tokens")
        if len(self.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools: at most {MAX_TOOLS} are allowed, not {len(self.tools)}", "tools")
        check_template_variables(self.chat_template_kwargs)
        if self.prediction is not None:
            self.check_prediction()

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of unknown fields inside known ones."""
        yield from GenerationBody.find_ignored(data)
        yield from find_ignored_in_messages(data.get("messages"))
        yield from find_ignored_in_tools(data.get("tools"))
        yield from find_ignored_in_choice(data.get("tool_choice"))
        yield from find_ignored_in_prediction(data.get("prediction"))

    def check_prompt(self) -> None:
        """Check that there is exactly one prompt, and no field that it does not support.

        Raises:
            InvalidRequest: there is none or more than one, or a raw prompt with fields that only templates read.
        """
        if self.messages is None and self.prompt is None:
            raise InvalidRequest("messages: either messages or prompt is required", "messages")
        if self.messages is not None and self.prompt is not None:
            raise InvalidRequest("prompt: not allowed together with messages; give one of them", "prompt")
        if self.prompt is not None:
            check_raw_prompt(self.prompt, {name: getattr(self, name) for name in TEMPLATE_FIELDS})

    def check_prediction(self) -> None:
        """Check the form of a prediction, and that it is not combined with fields that OpenAI refuses with it.

        Raises:
            RequestError: says what is wrong.
        """
        read_prediction(self.prediction)
        check_prediction(
            n=self.n > 1,
            logprobs=self.logprobs,
            presence_penalty=(self.presence_penalty or 0) > 0,
            frequency_penalty=(self.frequency_penalty or 0) > 0,
            max_completion_tokens=self.max_completion_tokens is not None,
            tools=bool(self.tools),
        )

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields, including log-probabilities."""
        num_logprobs = {"num_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**super().sampling(), **num_logprobs}

    def stopping(self) -> dict[str, Any]:
        """Return the stopping fields."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**super().stopping(), **limit}

    def chat(self) -> dict[str, Any]:
        """Return the prompt and its options, as fields of :class:`enginehouse.contract.types.GenerateRequest`.

        Raises:
            RequestError: messages or tools are invalid.
        """
        prediction = read_prediction(self.prediction)
        if self.messages is None:
            return {"text": self.prompt, "prediction": prediction}
        variables = self.chat_template_kwargs
        return {
            "prediction": prediction,
            "messages": read_messages(self.messages),
            "tool_use": read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            "thinking": read_thinking(self.enable_thinking, self.reasoning_effort, self.thinking_budget, variables),
            "template_variables": variables,
        }


def chat_route(state: ApiState) -> HTTPRouteHandler:
    """Return the route, relative to the mount prefix of the API."""
    settings = state.settings
    server = settings.server
    decoder = BodyDecoder(
        ChatBody,
        state.registry.samplers,
        settings.limits,
        server.unsupported_parameters,
        logs_prompts=server.log_prompts,
    )

    @post("/chat/completions", status_code=200)
    async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIApp:
        """Continue a chat."""
        caller = caller_of(request.scope)
        profile = caller.profile
        decoded = await decoder.read(await read_body(request.receive, settings.limits.max_body_bytes), caller)
        request_id = f"{profile.chat_id}{uuid.uuid4().hex}"

        def dialect(assembly: Assembly) -> Dialect:
            body, own_chunk = decoded.body, profile.usage_in_streams == "own_chunk"
            options = ChatOptions(
                num_choices=body.n,
                usage_chunk=body.include_usage and own_chunk,
                profile=profile,
                reasoning_field=server.reasoning_field,
            )
            chat = ChatDialect(request_id, assembly, options)
            return HeldUsage(chat) if body.include_usage and not own_chunk else chat

        request_made = await aside(decoded.is_large, lambda: decoded.request(request_id, **decoded.body.chat()))
        return GenerationResponse(state=state, decoded=decoded, requests=[request_made], dialect=dialect)

    return create_chat_completion
