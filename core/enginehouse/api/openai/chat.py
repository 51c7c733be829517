"""``POST /v1/chat/completions``: its body and its route."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.bodies import GenerationBody
from enginehouse.api.openai.chat_assembler import ChatAssembler, ChatOptions
from enginehouse.api.openai.prompt_scores import score_prompts
from enginehouse.api.openai.prompts import (
    TEMPLATE_FIELDS,
    check_prediction,
    check_raw_prompt,
    find_ignored_in_messages,
    find_ignored_in_prediction,
    read_messages,
    read_prediction,
)
from enginehouse.api.openai.tools import (
    check_template_variables,
    find_ignored_in_choice,
    find_ignored_in_tools,
    read_thinking,
    read_tool_use,
)
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import MAX_TOOLS, ChatFields
from enginehouse.contract.surface import GenerationRoute, new_id
from enginehouse.contract.types import GenerateRequest
from enginehouse.settings.config import LimitsSettings


@frozen(kw_only=True)
class ChatBody(GenerationBody, ChatFields):
    """The request body."""

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
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: not true together with add_generation_prompt; give one of them"
            raise InvalidRequest(message, "continue_final_message")
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
        variables, messages = self.chat_template_kwargs, read_messages(self.messages)
        if self.continue_final_message and (messages[-1].role != "assistant" or messages[-1].tool_calls):
            message = "continue_final_message: the last message must be an assistant's, without tool calls"
            raise InvalidRequest(message, "continue_final_message")
        return {
            "prediction": prediction,
            "messages": messages,
            "continues": self.continue_final_message,
            "opens_turn": self.add_generation_prompt is not False,
            "tool_use": read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            "thinking": read_thinking(self.enable_thinking, self.reasoning_effort, self.thinking_budget, variables),
            "template_variables": variables,
        }


def chat_route(state: ApiState) -> GenerationRoute:
    """Return the route, without a prefix."""
    reasoning_field = state.settings.server.reasoning_field

    def requests(call: DecodedCall[ChatBody]) -> list[GenerateRequest]:
        return [call.body.request(new_id(call.caller.profile.chat_id), **call.body.chat())]

    async def assemble(call: DecodedCall[ChatBody], assembly: Assembly) -> ChatAssembler:
        profile = call.caller.profile
        usage = profile.usage_in_streams if call.body.include_usage else None
        score_prompts(assembly, call.body)
        return ChatAssembler(
            assembly,
            ChatOptions(
                usage=usage,
                profile=profile,
                reasoning_field=reasoning_field,
                has_timings=call.body.timings_per_token,
            ),
        )

    return GenerationRoute(
        path="/chat/completions",
        name="create_chat_completion",
        summary="Continue a chat",
        body=ChatBody,
        requests=requests,
        assemble=assemble,
        request_schema=reference("ChatCompletionRequest"),
        response_schema=reference("ChatCompletion"),
        chunk_schema=reference("ChatCompletionChunk"),
    )
