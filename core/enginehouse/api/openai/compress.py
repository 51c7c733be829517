"""``POST /v1/compress``: the texts of a request as compression would leave them, with reasons; nothing is generated.

The request is prepared as for a generation: all preparers of plugins change it, and if it does not fit the context, it
is shortened where the settings allow that. What a preparer asks models for counts as the caller's tokens.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.running_answers import RunningAnswer, estimate_tokens
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.http.access import record_of
from enginehouse.api.http.callers import check_priority, ticket_of
from enginehouse.api.http.errors import ClientLeft
from enginehouse.api.http.exchange import deadlines
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openapi.answers import reference
from enginehouse.contract.surface import Reply, ReplyRoute, Route, new_id
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.pipeline.preparing import Prepared
from enginehouse.serving.background import run_in_thread

_PREPARER = "compression"
"""Name of the preparer whose report is shown."""


def compress_route(state: ApiState) -> Route:
    """Return the route, without a prefix. Its body is that of a chat, or of a raw prompt."""

    async def explain_compression(call: DecodedCall[ChatBody]) -> Reply:
        body = call.body
        check_priority(call.caller, body.priority)
        asked = await run_in_thread(
            call.is_large, lambda: call.identify(body.request(new_id("compress-"), **body.chat()))
        )
        name = call.server.model(body.model).name
        prepared = await _preview(state, call.server, evolve(asked, model=name))
        call.unsupported.extend(prepared.unsupported)
        return Reply(_shown(asked, prepared))

    return ReplyRoute(
        path="/compress",
        name="explain_compression",
        summary="Which parts of a chat or a prompt compression would keep, and why",
        body=ChatBody,
        limits="all",
        handle=explain_compression,
        request_schema=reference("CompressRequest"),
        response_schema=reference("Compression"),
    )


async def _preview(state: ApiState, server: ServerAccess, request: GenerateRequest) -> Prepared:
    """Prepare a request within the limits, deadlines and cancellation of one that generates."""
    record, ticket = record_of(server.scope), ticket_of(server.scope)
    record.answer_id = request.request_id
    if ticket is not None:
        await state.admission.reserve(ticket, estimate_tokens([evolve(request, num_choices=0)]))
        ticket.used = 0
    timeouts = state.settings.timeouts(state.manager.find(request.model).settings)
    async with state.exchanges.open(server.receive, state.settings.server.ping_s) as exchange:
        exchange.begin(RunningAnswer(exchange, record, (request,)))
        with deadlines(exchange, timeouts, record.began, lambda: False):
            prepared: Prepared | None = await exchange.until_ended(state.pipeline.preview(request))
        if prepared is None:
            raise exchange.error or ClientLeft("The client closed the connection before its response.")
    record.model = prepared.model.name
    if ticket is not None:
        ticket.used = sum(report.num_read_tokens for report in prepared.reports.values() if report is not None)
    return prepared


def _shown(asked: GenerateRequest, prepared: Prepared) -> dict[str, Any]:
    report = prepared.reports.get(_PREPARER)
    changed = prepared.request
    if asked.messages is None or changed.messages is None:
        texts: dict[str, Any] = {"prompt": changed.text}
    else:
        texts = {"messages": [_message(*pair) for pair in zip(asked.messages, changed.messages, strict=True)]}
    explained = report.explain() if report is not None and report.explain is not None else {"texts": []}
    return {
        "object": "compression",
        "model": prepared.model.name,
        "compression": None if report is None else dict(report.details),
        **explained,
        **texts,
    }


def _message(asked: Message, changed: Message) -> dict[str, Any]:
    return {"role": changed.role, "content": changed.content, "is_shortened": changed.content != asked.content}
