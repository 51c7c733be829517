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

from enginehouse.api.answer import Choice, Piece
from enginehouse.api.body import read_body
from enginehouse.api.decoding import BodyDecoder, GenerationBody
from enginehouse.api.encoding import chat_logprobs, encode_json, encode_line, fingerprint
from enginehouse.api.generation import GenerationResponse
from enginehouse.api.messages import MessageBody, find_ignored_in_messages, read_messages
from enginehouse.api.sse import event
from enginehouse.api.state import ApiState
from enginehouse.config import LimitsSettings
from enginehouse.errors import InvalidRequest
from enginehouse.parameters import INT64_MAX
from enginehouse.pipeline import RunningRequest

__all__ = ["ChatBody", "ChatDialect", "chat_route"]


@frozen(kw_only=True)
class ChatBody(GenerationBody):
    """The request body. ``max_completion_tokens`` is another name of ``max_tokens``."""

    messages: tuple[MessageBody, ...]
    max_completion_tokens: int | None = field(default=None, validator=optional([ge(1), le(INT64_MAX)]))
    logprobs: bool = False
    top_logprobs: int | None = field(default=None, validator=optional([ge(0), le(20)]))

    def check(self, limits: LimitsSettings) -> None:
        """Check combinations of fields."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) differ"
            raise InvalidRequest(f"{message}; give one of them", "max_completion_tokens")

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Paths of unknown fields inside known ones."""
        yield from GenerationBody.find_ignored(data)
        yield from find_ignored_in_messages(data["messages"])

    def sampling(self) -> dict[str, Any]:
        """The sampling fields, log-probabilities included."""
        num_logprobs = {"num_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**super().sampling(), **num_logprobs}

    def stopping(self) -> dict[str, Any]:
        """The stopping fields."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": self.max_completion_tokens}
        return {**super().stopping(), **limit}


def chat_route(state: ApiState) -> HTTPRouteHandler:
    """The route."""
    settings = state.settings
    decoder = BodyDecoder(ChatBody, state.registry.samplers, settings.limits, settings.server.unsupported_parameters)

    @post("/v1/chat/completions", status_code=200)
    async def create_chat_completion(request: Request[Any, Any, Any]) -> ASGIApp:
        """Continue a chat."""
        decoded = decoder.decode(await read_body(request.receive, settings.limits.max_body_bytes))
        messages = read_messages(decoded.body.messages)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"

        def dialect(running: RunningRequest) -> ChatDialect:
            return ChatDialect(request_id, running, decoded.body)

        requests = [decoded.request(request_id, messages=messages)]
        return GenerationResponse(state=state, decoded=decoded, requests=requests, dialect=dialect)

    return create_chat_completion


class ChatDialect:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects.

    Events are hot: everything that does not change between them is encoded once.
    """

    def __init__(self, request_id: str, running: RunningRequest, body: ChatBody) -> None:
        self._num_choices = body.n
        self._reports_usage = body.stream and body.include_usage
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": running.model.name,
            "system_fingerprint": fingerprint(running.model.info),
        }
        start = b"data: " + encode_line(self._head)[:-1] + b',"choices":[{"index":'
        self._starts = [start + str(index).encode() + b',"delta":{' for index in range(body.n)]
        self._usage = b',"usage":null' if self._reports_usage else b""
        self._end = b'},"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def opening(self) -> bytes:
        """The role of every choice."""
        return b"".join(start + b'"role":"assistant","content":""' + self._end for start in self._starts)

    def event(self, piece: Piece) -> bytes:
        """A chunk with text, or with the reason why the choice ended."""
        start = self._starts[piece.index]
        if piece.finish_reason is None and piece.logprobs is None:
            return start + b'"content":' + encode_line(piece.text) + self._end
        content = b"" if piece.finish_reason else b'"content":' + encode_line(piece.text)
        logprobs = b"null" if piece.logprobs is None else encode_line(chat_logprobs(piece.logprobs))
        reason = encode_json(piece.finish_reason)
        end = b'},"logprobs":' + logprobs + b',"finish_reason":' + reason + b"}]" + self._usage + b"}\n\n"
        return start + content + end

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the token counts."""
        return event(encode_line({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """The whole answer."""
        written = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return encode_json({**self._head, "object": "chat.completion", "choices": written, "usage": usage})
