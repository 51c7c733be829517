"""``POST /v1/chat/completions``: its body, its route, and the responses and chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from enginehouse.api.generation.assembly import Assembly, Choice
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.details import late_headers
from enginehouse.api.http.errors import error_body
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.bodies import GenerationBody
from enginehouse.api.openai.encoding import (
    TextChunks,
    chat_logprobs,
    held_chunks,
    usage_object,
    with_details,
)
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
from enginehouse.contract.surface import CallPiece, Chunk, ErrorAnswer, GenerationRoute, Piece, new_id
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.types import GenerateRequest, TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.profiles import Profile

_REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


@frozen(kw_only=True)
class ChatOptions:
    """Options of the response format.

    Attributes:
        usage: place of the token counts in a stream: a chunk of their own, the last chunk with content, or none.
        profile: determines the format.
        reasoning_field: member for reasoning, unless the profile specifies it.
        has_timings: responses and chunks have the member ``timings``.
    """

    usage: Literal["own_chunk", "last_content"] | None
    profile: Profile
    reasoning_field: Literal["reasoning_content", "reasoning", "both"]
    has_timings: bool = False


class ChatAssembler:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, assembly: Assembly, options: ChatOptions) -> None:
        profile, running = options.profile, assembly.running[0]
        self._profile = profile
        self._assembly = assembly
        self._usage = options.usage
        self._has_timings = options.has_timings
        self._reasoning_fields = _REASONING_FIELDS[profile.reasoning_field or options.reasoning_field]
        self._head = {
            "id": assembly.id,
            "created": int(time.time()),
            "model": assembly.model,
            "system_fingerprint": running.fingerprint,
        }
        self._chunk_head = self._select(profile.chunk_head, profile.chunk_object)
        self._tail = {"usage": None} if options.usage == "own_chunk" else {}
        has_more = assembly.has_details or options.has_timings or bool(profile.optimization_headers)
        self._held = held_chunks(options.usage, has_more=has_more)
        is_plain = self._held is None and not assembly.shows_token_ids and not options.has_timings
        self._sends_at_once = assembly.is_streamed and is_plain
        self._texts = TextChunks(lambda index, text: self._chunk(index, {"content": text}), assembly.num_choices)

    def _select(self, members: Sequence[str], kind: str) -> dict[str, Any]:
        """Return the head of an object of that kind."""
        head = {**self._head, "object": kind}
        return {name: head[name] for name in members}

    def opening(self) -> list[Chunk]:
        """Return the role of every choice; the first chunk has the prompt's token ids, if they are requested."""
        chunks = [self._chunk(index, self._profile.opening_delta) for index in range(self._assembly.num_choices)]
        chunks[0] |= self._prompt_token_ids()
        return chunks

    def _prompt_token_ids(self) -> dict[str, Any]:
        shown = self._assembly.prompt_token_ids(0)
        return {} if shown is None else {"prompt_token_ids": shown}

    def push(self, piece: Piece) -> Sequence[Chunk | bytes]:
        """Return a chunk with text, reasoning or part of a call, or with the finish reason of the choice."""
        if self._sends_at_once and piece.text and piece.logprobs is None and piece.finish_reason is None:
            return self._texts.of(piece)
        if not self._assembly.is_streamed:
            return ()
        if piece.progress is not None:
            return (self._chunk(piece.index, {}) | {"prompt_progress": progress_object(piece.progress)},)
        if piece.scores is not None:
            chunk = self._chunk(piece.index, {}) | piece.scores
        else:
            chunk = self._chunk(piece.index, self._delta(piece), piece.logprobs, piece.finish_reason)
            if self._assembly.shows_token_ids:
                chunk["choices"][0]["token_ids"] = list(piece.token_ids)
            if self._has_timings:
                chunk |= self._timings(self._assembly.usage())
        return (chunk,) if self._held is None else self._held.push(chunk, piece)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: str | None = None,
    ) -> Chunk:
        choice: dict[str, Any] = {"index": index, "delta": delta}
        if logprobs is not None:
            choice["logprobs"] = chat_logprobs(logprobs)
        elif self._profile.null_logprobs:
            choice["logprobs"] = None
        choice["finish_reason"] = finish_reason
        return {**self._chunk_head, "choices": [choice], **self._tail}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """Return the members of a delta."""
        if piece.finish_reason is not None:
            return {}
        if piece.reasoning:
            return dict.fromkeys(self._reasoning_fields, piece.reasoning)
        if piece.call is not None:
            return {"tool_calls": [_call_delta(piece.call)]}
        return {"content": piece.text}

    def close(self, usage: Usage, details: dict[str, Any] | None) -> list[Chunk]:
        """Return what was held back, with the token counts and the details where they belong."""
        last = self._held.take() if self._held is not None else []
        if self._usage == "own_chunk":
            last.append({**self._chunk_head, "choices": [], "usage": self.counts(usage)})
        elif self._usage == "last_content":
            last[0]["usage"] = self.counts(usage)
        if last:
            last[-1] |= self._timings(usage) | late_headers(usage, self._profile)
        return with_details(last, details)

    def fail(self, error: ErrorAnswer) -> list[Chunk]:
        """Return what was held back, and the error."""
        return [*(self._held.take() if self._held is not None else ()), error_body(error)]

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the whole response."""
        head = self._select(self._profile.whole_head, "chat.completion")
        written = [self._choice(choice) for choice in self._assembly.choices]
        scores = self._assembly.scores.members(0) if self._assembly.scores is not None else {}
        described = {**scores, **self._prompt_token_ids(), **self._timings(usage)}
        (whole,) = with_details([{**head, "choices": written, **described, "usage": self.counts(usage)}], details)
        return whole

    def _timings(self, usage: Usage) -> dict[str, Any]:
        return {"timings": timings(usage)} if self._has_timings else {}

    def counts(self, usage: Usage) -> dict[str, Any]:
        """Return the token counts that the profile includes."""
        has_times = self._profile.usage_times and (self._assembly.is_streamed or self._has_timings)
        counts = usage_object(usage, has_times=has_times)
        if self._profile.usage_details:
            return counts
        return {name: count for name, count in counts.items() if not isinstance(count, dict)}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        written: dict[str, Any] = {"index": choice.index, "message": self._message(choice)}
        if choice.logprobs is not None or self._profile.null_logprobs:
            written["logprobs"] = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
        written["finish_reason"] = choice.finish_reason
        return {**written, "token_ids": choice.token_ids} if self._assembly.shows_token_ids else written

    def _message(self, choice: Choice) -> dict[str, Any]:
        """Return the message of a complete choice; content is null if there are only calls."""
        nulls = self._profile.null_members
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if "refusal" in nulls:
            message["refusal"] = None
        if choice.reasoning or "reasoning" in nulls:
            message |= dict.fromkeys(self._reasoning_fields, choice.reasoning or None)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]
        elif "tool_calls" in nulls:
            message["tool_calls"] = None
        return message


def _call_delta(call: CallPiece) -> dict[str, Any]:
    """Return one entry of ``tool_calls`` in a delta."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


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
