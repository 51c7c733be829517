"""Pooling requests of surfaces: permissions, limits, deadlines, cancellation and log, as for requests that generate."""

from __future__ import annotations

import msgspec
from litestar.types import Scope

from enginehouse.api.generation.running_answers import RunningAnswer, num_tokens_of
from enginehouse.api.http.access import AccessRecord, record_of
from enginehouse.api.http.callers import Caller, check_model, check_priority, ticket_of
from enginehouse.api.http.errors import ClientLeft
from enginehouse.api.http.exchange import Receive, deadlines
from enginehouse.api.http.security import memory_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.surface import new_id
from enginehouse.contract.types import PoolingRequest, PoolingResult
from enginehouse.contract.usage import Usage
from enginehouse.serving.background import run_in_thread

_MANY_TEXTS = 256
"""Texts whose length is counted off the event loop."""


async def pool(state: ApiState, scope: Scope, receive: Receive, caller: Caller, asked: PoolingRequest) -> PoolingResult:
    """Return the rows of a request; the account of memory counts them, and their text, until the response has ended.

    Raises:
        EnginehouseError: it is refused, fails, takes too long, its rows or their text do not fit the account of memory,
            or its client has disconnected.
    """
    check_model(caller, asked.model, state.manager)
    check_priority(caller, asked.priority)
    _check_number(asked, state.settings.limits.max_inputs)
    request = msgspec.structs.replace(
        asked,
        request_id=asked.request_id or new_id("pool-"),
        caller=caller.name,
        namespace=caller.namespace(asked.namespace),
        allowed_models=caller.allowed_models,
    )
    record = record_of(scope)
    record.answer_id, record.asked_model = request.request_id, request.model
    record.request_id = record.request_id or request.request_id
    ticket = ticket_of(scope)
    if ticket is not None:
        is_large = len(request.inputs) > _MANY_TEXTS
        await state.admission.reserve(ticket, await run_in_thread(is_large, lambda: num_tokens_of(request)))
    num_used = 0
    timeouts = state.settings.timeouts(state.manager.find(request.model).settings)
    async with state.exchanges.open(receive, state.settings.server.ping_s) as exchange:
        exchange.begin(RunningAnswer(exchange, record, (), pooling=request))
        try:
            with deadlines(exchange, timeouts, record.began, lambda: False):
                result: PoolingResult | None = await exchange.until_ended(
                    state.pipeline.pool(request, memory_of(scope).take)
                )
            if result is None:
                raise exchange.error or ClientLeft("The client closed the connection before its response.")
            num_used = sum(result.num_tokens)
            _note(record, request, result, num_used)
        finally:
            if ticket is not None:
                ticket.used = (ticket.used or 0) + num_used
    return result


def _check_number(request: PoolingRequest, most: int) -> None:
    """Raise InvalidRequest if a request has too many inputs."""
    if (number := len(request.inputs)) > most:
        message = f"{request.path}: has {number} texts; a request may have {most} (limits.max_inputs)"
        raise InvalidRequest(message, request.path)


def _note(record: AccessRecord, request: PoolingRequest, result: PoolingResult, num_tokens: int) -> None:
    """Count a request in the access record; several of one call add up."""
    record.model = result.model
    record.num_texts = (record.num_texts or 0) + len(request.inputs)
    record.usage = (record.usage or Usage()) + Usage(prompt_tokens=num_tokens)
