"""``POST /v1/compress``: the messages or the prompt of a request as compression would leave them; nothing is generated.

All preparers of plugins run, as they would for a generation. A compressor that scores texts uses the model for it, and
what it reads counts as the caller's tokens.
"""

from __future__ import annotations

from typing import Any

from enginehouse.api.generation.decoding import Decoded
from enginehouse.api.http.callers import check_priority, ticket_of
from enginehouse.api.http.errors import ClientLeft
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.surface import AnswerRoute, Reply, Route, new_id
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.pipeline.preparing import Reports
from enginehouse.serving.background import run_in_thread

_PREPARER = "compression"
"""Name of the preparer whose report is shown."""


def compress_route(state: ApiState) -> Route:
    """Return the route, without a prefix. Its body is that of a chat."""

    async def explain_compression(call: Decoded[ChatBody]) -> Reply:
        body = call.body
        check_priority(call.caller, body.priority)
        asked = await run_in_thread(
            call.is_large, lambda: call.identify(body.request(new_id("compress-"), **body.chat()))
        )
        ticket = ticket_of(call.server.scope)
        if ticket is not None:
            await state.admission.reserve(ticket, 0)  # what is read is known at the end
            ticket.used = 0
        changed, reports, left_out, name = await _preview(state, call, asked)
        call.unsupported.extend(left_out)
        if ticket is not None:
            ticket.used = sum(report.num_read_tokens for report in reports.values() if report is not None)
        report = reports.get(_PREPARER)
        details = None if report is None else dict(report.details)
        return Reply({"object": "compression", "model": name, "compression": details, **_shown(asked, changed)})

    return AnswerRoute(
        path="/compress",
        name="explain_compression",
        summary="What compression would leave of a chat or a prompt",
        body=ChatBody,
        limits="all",
        handle=explain_compression,
        request_schema=reference("CompressRequest"),
        response_schema=reference("Compression"),
    )


async def _preview(
    state: ApiState, call: Decoded[ChatBody], asked: GenerateRequest
) -> tuple[GenerateRequest, Reports, tuple[str, ...], str]:
    """Return the changed request, what was done, and the model's name; ends when the client disconnects."""

    async def work() -> tuple[GenerateRequest, Reports, tuple[str, ...], str]:
        async with call.server.use(call.body.model) as model:
            return *await state.pipeline.preview(asked, model), model.name

    async with state.exchanges.open(call.server.receive, state.settings.server.ping_s) as exchange:
        found = await exchange.until_ended(work())
        if found is None:
            raise exchange.error or ClientLeft("The client closed the connection before its response.")
        done: tuple[GenerateRequest, Reports, tuple[str, ...], str] = found
        return done


def _shown(asked: GenerateRequest, changed: GenerateRequest) -> dict[str, Any]:
    """Return the texts that stay."""
    if asked.messages is None or changed.messages is None:
        return {"prompt": changed.text}
    return {"messages": [_message(*pair) for pair in zip(asked.messages, changed.messages, strict=True)]}


def _message(asked: Message, changed: Message) -> dict[str, Any]:
    return {"role": changed.role, "content": changed.content, "is_shortened": changed.content != asked.content}
