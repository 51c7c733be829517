"""``POST /v1/chat/completions``: its body, its wire format, its handler."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, le, optional
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from enginehouse.api.answer import Assembly, Choice
from enginehouse.api.body import KEEPS_NULLS, read_body
from enginehouse.api.choice_parser import CallPiece, Piece
from enginehouse.api.decoding import BodyDecoder, GenerationBody
from enginehouse.api.encoding import chat_logprobs, encode_json, encode_line, fingerprint
from enginehouse.api.generation import GenerationResponse
from enginehouse.api.messages import MessageBody, find_ignored_in_messages, read_messages
from enginehouse.api.sse import event
from enginehouse.api.state import ApiState
from enginehouse.api.thinking import Effort, check_template_variables, read_thinking
from enginehouse.api.tools import MAX_TOOLS, ToolBody, find_ignored_in_tools, read_tool_use
from enginehouse.config import LimitsSettings, ServerSettings
from enginehouse.errors import InvalidRequest
from enginehouse.parameters import INT64_MAX

__all__ = ["ChatBody", "ChatDialect", "chat_route"]

_REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


@frozen(kw_only=True)
class ChatBody(GenerationBody):
    """The request body.

    Attributes:
        max_completion_tokens: another name of ``max_tokens``.
        tool_choice: ``none``, ``auto``, ``required``, or an object that names a function.
        enable_thinking: whether to reason, where the model has the choice.
        thinking_budget: most tokens of reasoning; 0 is none, -1 is no limit.
        chat_template_kwargs: further variables of the chat template.
    """

    messages: tuple[MessageBody, ...]
    max_completion_tokens: int | None = field(default=None, validator=optional([ge(1), le(INT64_MAX)]))
    logprobs: bool = False
    top_logprobs: int | None = field(default=None, validator=optional([ge(0), le(20)]))
    tools: tuple[ToolBody, ...] = field(default=(), metadata=KEEPS_NULLS)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = field(default=None, validator=optional([ge(-1), le(2**31 - 1)]))
    chat_template_kwargs: dict[str, Any] = field(factory=dict, metadata=KEEPS_NULLS)

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) differ"
            raise InvalidRequest(f"{message}; give one of them", "max_completion_tokens")
        if len(self.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools: at most {MAX_TOOLS} are allowed, not {len(self.tools)}", "tools")
        check_template_variables(self.chat_template_kwargs)

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Paths of unknown fields inside known ones."""
        yield from GenerationBody.find_ignored(data)
        yield from find_ignored_in_messages(data["messages"])
        yield from find_ignored_in_tools(data.get("tools"))

    def sampling(self) -> dict[str, Any]:
        """The sampling fields, log-probabilities included."""
        num_logprobs = {"num_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**super().sampling(), **num_logprobs}

    def stopping(self) -> dict[str, Any]:
        """The stopping fields."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**super().stopping(), **limit}

    def chat(self) -> dict[str, Any]:
        """The fields of :class:`enginehouse.types.GenerateRequest` that only chats have.

        Raises:
            RequestError: messages or tools are wrong.
        """
        variables = self.chat_template_kwargs
        return {
            "messages": read_messages(self.messages),
            "tool_use": read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            "thinking": read_thinking(self.enable_thinking, self.reasoning_effort, self.thinking_budget, variables),
            "template_variables": variables,
        }


def chat_route(state: ApiState) -> HTTPRouteHandler:
    """The route."""
    settings = state.settings
    decoder = BodyDecoder(ChatBody, state.registry.samplers, settings.limits, settings.server.unsupported_parameters)

    @post("/v1/chat/completions", status_code=200)
    async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIApp:
        """Continue a chat."""
        decoded = decoder.decode(await read_body(request.receive, settings.limits.max_body_bytes))
        request_id = f"chatcmpl-{uuid.uuid4().hex}"

        def dialect(assembly: Assembly) -> ChatDialect:
            return ChatDialect(request_id, assembly, decoded.body, settings.server)

        requests = [decoded.request(request_id, **decoded.body.chat())]
        return GenerationResponse(state=state, decoded=decoded, requests=requests, dialect=dialect)

    return create_chat_completion


class ChatDialect:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects.

    Events are hot: everything that does not change between them is encoded once.
    """

    def __init__(self, request_id: str, assembly: Assembly, body: ChatBody, settings: ServerSettings) -> None:
        model = assembly.running[0].model
        self._reasoning_fields = _REASONING_FIELDS[settings.reasoning_field]
        self._reports_usage = body.stream and body.include_usage
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": fingerprint(model.info),
        }
        start = b"data: " + encode_line(self._head)[:-1] + b',"choices":[{"index":'
        self._starts = [start + str(index).encode() + b',"delta":{' for index in range(body.n)]
        self._usage = b',"usage":null' if self._reports_usage else b""
        self._end = b'},"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def opening(self) -> bytes:
        """The role of every choice."""
        return b"".join(start + b'"role":"assistant","content":""' + self._end for start in self._starts)

    def event(self, piece: Piece) -> bytes:
        """A chunk with text, reasoning or part of a call, or with the reason why the choice ended."""
        start = self._starts[piece.index]
        if piece.finish_reason is None and piece.logprobs is None and piece.text:
            return start + b'"content":' + encode_line(piece.text) + self._end
        logprobs = b"null" if piece.logprobs is None else encode_line(chat_logprobs(piece.logprobs))
        reason = encode_json(piece.finish_reason)
        end = b'},"logprobs":' + logprobs + b',"finish_reason":' + reason + b"}]" + self._usage + b"}\n\n"
        return start + self._delta(piece) + end

    def _delta(self, piece: Piece) -> bytes:
        """The members of a delta."""
        if piece.finish_reason is not None:
            return b""
        if piece.reasoning:
            return encode_line(dict.fromkeys(self._reasoning_fields, piece.reasoning))[1:-1]
        if piece.call is not None:
            return b'"tool_calls":[' + encode_line(_call_delta(piece.call)) + b"]"
        return b'"content":' + encode_line(piece.text)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the token counts."""
        return event(encode_line({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """The whole answer."""
        written = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return encode_json({**self._head, "object": "chat.completion", "choices": written, "usage": usage})

    def _message(self, choice: Choice) -> dict[str, Any]:
        """The message of a whole choice; content is null where there are only calls."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
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
        return message


def _call_delta(call: CallPiece) -> dict[str, Any]:
    """One entry of ``tool_calls`` in a delta."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
