"""The surface ``anthropic``: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from enginehouse.contract.calls import Call
from enginehouse.contract.surface import (
    Answer,
    ErrorAnswer,
    Frame,
    GenerationRoute,
    Reply,
    ReplyRoute,
    Route,
    new_id,
)
from enginehouse.contract.types import GenerateRequest, Thinking
from enginehouse_anthropic.assembler import MessageAssembler, MessageOptions, ThinkingDisplay
from enginehouse_anthropic.body import CountTokensBody, MessagesBody
from enginehouse_anthropic.conversation import read_conversation
from enginehouse_anthropic.errors import error_body, error_status
from enginehouse_anthropic.models import list_models, show_model
from enginehouse_anthropic.options import read_output, read_thinking, read_tool_use
from enginehouse_anthropic.signatures import Signatures

__all__ = ["EVENTS", "AnthropicSurface"]

EVENTS = Frame(
    media_type="text/event-stream; charset=utf-8",
    before=b"data: ",
    after=b"\n\n",
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
    event="type",
)
"""Server-sent events, named as their types; a complete stream ends with ``message_stop``."""

_VERSION = "anthropic-version"
"""Header of every client of this API; by it the addresses of models have this API's shape."""


class AnthropicSurface:
    """Routes of the Messages API."""

    name = "anthropic"
    api_version = 1
    request_id_header = "request-id"
    takes_any_type = False

    def __init__(self) -> None:
        self._signatures = Signatures()
        self.routes: Sequence[Route] = (
            GenerationRoute(
                path="/v1/messages",
                name="create_message",
                summary="Continue a conversation (Anthropic)",
                body=MessagesBody,
                requests=self._requests,
                assemble=self._assemble,
                frame=EVENTS,
            ),
            ReplyRoute(
                path="/v1/messages/count_tokens",
                name="count_message_tokens",
                summary="Number of tokens of a conversation (Anthropic)",
                body=CountTokensBody,
                handle=self._count_tokens,
            ),
            ReplyRoute(
                method="GET",
                path="/v1/models",
                header=_VERSION,
                name="list_anthropic_models",
                summary="List all models (Anthropic)",
                handle=list_models,
                limits=None,
            ),
            ReplyRoute(
                method="GET",
                path="/v1/models/{model_id:path}",
                header=_VERSION,
                name="show_anthropic_model",
                summary="Show one model (Anthropic)",
                handle=show_model,
                limits=None,
            ),
            ReplyRoute(
                method="HEAD", path="/", name="probe", summary="Probe of Claude Code", handle=_probe, limits=None
            ),
        )

    def error(self, error: ErrorAnswer) -> Reply:
        """Return the body of an error, and its status: 529 for an overload."""
        return Reply(error_body(error), status=error_status(error))

    def _requests(self, call: Call) -> list[GenerateRequest]:
        body, allowed = call.body, call.server.max_tokens
        if allowed is not None and body.max_tokens > allowed:
            call.ignore("max_tokens")
        limit = {"max_tokens": body.max_tokens if allowed is None else min(body.max_tokens, allowed)}
        progress = body.return_progress and body.stream
        if body.return_progress and not progress:
            call.ignore("return_progress")
        return [
            self._request(
                call, sampling=body.sampling(), stopping={**body.stopping(), **limit}, return_progress=progress
            )
        ]

    def _request(self, call: Call, **parameters: object) -> GenerateRequest:
        effort, constraint = read_output(call)
        return GenerateRequest(
            request_id=new_id("msg_"),
            model=call.body.model,
            messages=read_conversation(call, self._signatures),
            tool_use=read_tool_use(call),
            thinking=_switched(call, read_thinking(call, effort)),
            constraint=constraint,
            **parameters,  # type: ignore[arg-type]
        )

    async def _assemble(self, call: Call, answer: Answer) -> MessageAssembler:
        body: MessagesBody = call.body
        info = call.server.model(body.model).info
        if info is not None and answer.num_prompt_tokens + body.max_tokens > info.max_context:
            call.ignore("max_tokens")  # the room in the context is the limit
        options = MessageOptions(
            thinking=_display(body),
            signatures=self._signatures,
            stop_sequences=body.stopping().get("stop", ()),
            has_stop_regex=bool(body.stop_regex),
            counts_kept=body.is_marked,
            has_timings=body.timings_per_token,
        )
        return MessageAssembler(answer, options)

    async def _count_tokens(self, call: Call) -> Reply:
        return Reply({"input_tokens": await call.server.count_tokens(self._request(call))})


def _switched(call: Call, thinking: Thinking) -> Thinking:
    """Return the options without the switch that a body without ``thinking`` implies, if the model refuses it."""
    if call.body.thinking is not None:
        return thinking
    entry = call.server.model(call.body.model)
    is_refused = entry.info is not None and "enable_thinking" not in entry.supports
    return evolve(thinking, enabled=None) if is_refused else thinking


def _display(body: MessagesBody) -> ThinkingDisplay:
    if not body.thinks:
        return "dropped"
    return "sealed" if body.thinking.get("display") == "omitted" else "shown"


async def _probe(_: Call) -> Reply:
    return Reply()
