"""Answers a generation request, streamed or whole: start, then write. Shared by all generation endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from attrs import evolve, frozen
from litestar.types import Receive, Scope, Send

from enginehouse.api.generation.assembly import Assembly, event_batches, report_headers
from enginehouse.api.generation.choice_parser import PredictionCount
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.details import (
    AnswerDetails,
    asks_for_details,
    optimization_headers,
    replica_headers,
    routed_headers,
)
from enginehouse.api.generation.running_answers import (
    RunningAnswer,
    check_request_sizes,
    estimate_tokens,
    used_tokens,
)
from enginehouse.api.generation.stream import ReplyResponse, ResponseStream
from enginehouse.api.generation.surface_calls import SurfaceCalls
from enginehouse.api.http.access import AccessRecord, record_of
from enginehouse.api.http.admission import Ticket
from enginehouse.api.http.callers import check_model, check_priority, may_see_prompts, ticket_of
from enginehouse.api.http.exchange import Exchange, deadlines
from enginehouse.api.http.frames import encode_json, encode_line, send_body
from enginehouse.api.http.origins import foreign_sign
from enginehouse.api.http.security import connection_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.schema_keywords import find_unknown_keywords
from enginehouse.contract.surface import Assembler, DetachedAssembler, GenerationRoute, Reply
from enginehouse.contract.types import Constraint, Event, GenerateRequest
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.serving.background import run_in_thread, run_with_plugins
from enginehouse.settings.limits import Timeouts

_prompt_log = logging.getLogger("enginehouse.prompts")
_EVENT_BYTES = 512
_LOGPROB_BYTES = 256
_MANY_LOGPROBS = 500  # with twenty alternatives each, written in about 10 ms


@frozen(eq=False)
class GenerationResponse:
    """An ASGI response. Refusals are raised before its first byte.

    Attributes:
        requests: one per prompt.
    """

    state: ApiState
    route: GenerationRoute
    surface: SurfaceCalls
    call: DecodedCall[Any]
    requests: Sequence[GenerateRequest]

    @classmethod
    async def make(
        cls, state: ApiState, route: GenerationRoute, surface: SurfaceCalls, call: DecodedCall[Any]
    ) -> GenerationResponse | ReplyResponse:
        """Return the response to a call; prepares the requests of a large one off the event loop.

        Raises:
            RequestError: the body is invalid.
        """
        requests = await surface.requests(route, call)
        if isinstance(requests, Reply):
            return ReplyResponse(state, call, requests)
        check_request_sizes(requests, state.settings.limits)
        call.ignore_unused(requests[0])
        for constraint in dict.fromkeys(one.constraint for one in requests):
            if constraint is not None and constraint.kind == "json_schema":
                await run_in_thread(call.is_large, partial(_note_annotations, call, constraint))
        return cls(state, route, surface, call, [call.identify(one) for one in requests])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start the request, and send the response as it is generated.

        Stops as soon as the client disconnects, unless the response is detached.
        """
        record = self._begin_record(scope)
        ticket = ticket_of(scope)
        assert ticket is not None, "every route that generates is metered"
        await self._reserve_tokens(ticket)
        async with self.state.exchanges.open(receive, self.state.settings.server.ping_s) as exchange:
            answer = RunningAnswer(exchange, record, self.requests)
            exchange.begin(answer)
            try:
                with (
                    _counted(scope, answer),
                    deadlines(exchange, self._timeouts(), record.began, lambda: _has_begun(answer)),
                ):
                    await self._answer(answer, scope, send)
            finally:
                ticket.used = used_tokens(answer)
                if answer.assembly is not None and not answer.assembly.is_complete:
                    answer.assembly.break_off()

    async def _reserve_tokens(self, ticket: Ticket) -> None:
        """Check the caller's permissions and reserve the tokens.

        Raises:
            RequestError: the caller may not use the model or the priority.
            RateLimited: it has used up its tokens.
        """
        caller, first = self.call.caller, self.requests[0]
        if not self.state.pipeline.is_routed(first.model):  # a router only considers allowed models
            check_model(caller, first.model, self.state.manager)
        check_priority(caller, first.priority)
        num_tokens = await run_in_thread(self.call.is_large, lambda: estimate_tokens(self.requests))
        await self.state.admission.reserve(ticket, num_tokens)

    def _timeouts(self) -> Timeouts:
        model = self.state.manager.find(self.state.pipeline.usual_model(self.requests[0].model))
        return self.state.settings.timeouts(model.settings)

    async def _answer(self, answer: RunningAnswer, scope: Scope, send: Send) -> None:
        """Start the request and write the response."""
        exchange, record, server = answer.exchange, answer.record, self.state.settings.server
        has_details = asks_for_details(scope["headers"], server.details)
        running = await self._start(answer)
        if running is None:
            _give_up(exchange, record)
            return
        record.model, record.parameters = running[0].model.name, running[0].parameters
        record.adapters = tuple(adapter.name for adapter in running[0].adapters)
        if server.log_prompts:
            _log_prompts(self.requests)
        first = self.requests[0]
        begin = partial(Assembly, first.request_id, running, first.num_choices, record, self.call.body.stream)
        are_foreign = any(one.parsing.are_foreign for one in running)
        if are_foreign:
            opening = run_with_plugins(True, lambda: begin(has_details=has_details))
            assembly: Assembly | None = await exchange.until_ended(opening)
        else:
            assembly = begin(has_details=has_details)
        if assembly is None:
            _give_up(exchange, record)
            return
        answer.assembly = assembly
        assembler = await exchange.until_ended(self.surface.assemble(self.route, self.call, assembly))
        if exchange.is_ended:
            _give_up(exchange, record)
            return
        left_out = dict.fromkeys(name for one in running for name in one.unsupported)
        profile = self.call.caller.profile
        headers = self.call.notices(left_out) + routed_headers(running, profile)
        headers += replica_headers(running) + report_headers(running, profile)
        details = self._details(assembly, scope)
        is_detached = await self.surface.is_detached(self.route, self.call)
        if is_detached:
            exchange.detach()
            if not assembly.is_streamed:
                early = cast(DetachedAssembler, assembler)
                body = await self.surface.ask("early", lambda: encode_json(self.surface.early(early)))
                await send_body(send, body, [("content-type", "application/json"), *headers])
                send = _to_nobody
        if assembly.is_streamed or is_detached:
            stream = ResponseStream(
                send, exchange, self.route.frame, assembler, self.surface, profile=profile, headers=headers
            )
            await stream.write(assembly, _batches(assembly), details)
            return
        await assembly.fold(_batches(assembly), assembler, self.surface.push if self.surface.is_foreign else None)
        if exchange.is_ended:
            _give_up(exchange, record)
            return
        assembly.complete()
        headers += optimization_headers(assembly.total(), profile)
        if self.surface.is_foreign:
            written = await self.surface.ask("whole", lambda: self._whole(assembly, assembler, details))
        else:
            written = await run_in_thread(_is_long(assembly), lambda: self._whole(assembly, assembler, details))
        await send_body(send, written, [("content-type", "application/json"), *headers])

    def _whole(self, assembly: Assembly, assembler: Assembler, details: AnswerDetails | None) -> bytes:
        """Return a response that is not streamed."""
        plain = None if details is None else details.to_plain()
        return encode_json(self.surface.whole(assembler, assembly.usage(), plain))

    def _begin_record(self, scope: Scope) -> AccessRecord:
        """Store everything known before submission in the access record."""
        record, request = record_of(scope), self.requests[0]
        record.answer_id = request.request_id
        record.request_id = record.request_id or request.request_id
        record.stream, record.asked_model = self.call.body.stream, request.model
        record.num_choices = len(self.requests) * request.num_choices
        return record

    def _details(self, assembly: Assembly, scope: Scope) -> AnswerDetails | None:
        """Return the writer of the extension member, if the response has it."""
        if not assembly.has_details:
            return None
        server = self.state.settings.server
        shows_kept_text = may_see_prompts(self.call.caller, server, is_local=foreign_sign(scope) is None)
        return AnswerDetails(self.call, assembly, self.state.registry.request_fields, shows_kept_text)

    async def _start(self, answer: RunningAnswer) -> list[RunningRequest] | None:
        """Start every prompt on its model; returns None if the exchange ended meanwhile.

        Raises:
            EnginehouseError: a prompt is refused, or its decoded media do not fit the account of memory.
        """
        exchange = answer.exchange

        async def start(request: GenerateRequest) -> RunningRequest:
            running = await self.state.pipeline.start(request, answer.discard)
            exchange.hold(running.generation)
            return running

        first, *others = self.requests
        started: list[RunningRequest] | None
        if others and not self.state.pipeline.is_routed(first.model):
            started = await exchange.until_ended(asyncio.gather(*(start(request) for request in self.requests)))
        else:
            running = await exchange.until_ended(start(first))
            started = None if running is None else [running]
            if started and others:  # all prompts of one response go to the same model
                same = [evolve(request, model=started[0].model.name) for request in others]
                rest = await exchange.until_ended(asyncio.gather(*map(start, same)))
                started = None if rest is None else [*started, *rest]
        return started


def _is_long(assembly: Assembly) -> bool:
    """Return True if a response takes long to write: each log-probability becomes an object, with its alternatives."""
    num_scored = sum(len(choice.logprobs or ()) for choice in assembly.choices)
    return num_scored + sum(map(len, assembly.prompt_logprobs)) > _MANY_LOGPROBS


def _num_waiting_bytes(answer: RunningAnswer) -> int:
    """Estimate the bytes of received events that are not written yet because the client does not read."""
    if answer.assembly is None:
        return 0
    num_events = sum(one.generation.num_waiting_events for one in answer.assembly.running)
    num_rivals = answer.requests[0].sampling.get("num_logprobs") or 0
    return num_events * (_EVENT_BYTES + num_rivals * _LOGPROB_BYTES)


@contextmanager
def _counted(scope: Scope, answer: RunningAnswer) -> Iterator[None]:
    """Let the connection count what waits until the client reads; the next request may already be answered there."""
    connection = connection_of(scope)
    count = partial(_num_waiting_bytes, answer)
    if connection is not None:
        connection.num_in_front = count
    try:
        yield
    finally:
        if connection is not None and connection.num_in_front is count:
            connection.num_in_front = None


async def _to_nobody(message: Any) -> None:
    """Drop a message to a client that has its response already."""


def _has_begun(answer: RunningAnswer) -> bool:
    return answer.assembly is not None and answer.assembly.has_begun


def _batches(assembly: Assembly) -> AsyncIterator[tuple[int, Sequence[Event]]]:
    """Return the events of all prompts, compared with the prediction if there is one."""
    batches = event_batches(assembly.running)
    predicted = assembly.running[0].prediction_token_ids
    return batches if predicted is None else assembly.counting(batches, PredictionCount(predicted))


def _give_up(exchange: Exchange, record: AccessRecord) -> None:
    """End without a response: the client has disconnected, or the server's error is raised."""
    if exchange.error is not None:
        raise exchange.error
    record.outcome = "cancelled"


def _note_annotations(call: DecodedCall[Any], constraint: Constraint) -> None:
    """List the unknown members and formats of a schema as ignored."""
    with suppress(ValueError, RecursionError):  # not JSON: the compiler refuses it
        for path in find_unknown_keywords(json.loads(constraint.text), constraint.param):
            call.ignore(path)


def _log_prompts(requests: Iterable[GenerateRequest]) -> None:
    """Log the prompt of each request that allows it: its id and, as JSON, its messages, text or token ids."""
    for request in requests:
        if not request.log_prompt:
            continue
        prompt = next(part for part in (request.messages, request.text, request.token_ids) if part is not None)
        line = f"id={request.request_id} prompt={encode_line(prompt).decode()}"
        if request.suffix is not None:
            line += f" suffix={encode_line(request.suffix).decode()}"
        _prompt_log.info("%s", line)
