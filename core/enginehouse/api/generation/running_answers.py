"""Running generation requests: inspection by operators, accounting of the caller's rates, and limits on their size.

Sizes are checked for what the requests of one call ask for together, whichever surface has made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import define

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.generation.reports import num_read_tokens
from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.admission.memory import Reservation
from enginehouse.api.http.errors import NotThinking, RequestNotRunning
from enginehouse.api.http.exchange import Exchange
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import InvalidRequest, RequestCancelled, quoted
from enginehouse.contract.inspection import Inspectable
from enginehouse.contract.types import GenerateRequest, PoolingRequest
from enginehouse.settings.config import LimitsSettings


@define(eq=False)
class RunningAnswer:
    """One request, from its decoded body to the end of its response.

    Attributes:
        requests: one per prompt; empty for a pooling request.
        assembly: output so far; None until every prompt is accepted by its engine.
        num_discarded_tokens: tokens computed for it that are in no response.
        pooling: a request to a pooling model.
    """

    exchange: Exchange
    record: AccessRecord
    requests: Sequence[GenerateRequest]
    assembly: Assembly | None = None
    num_discarded_tokens: int = 0
    pooling: PoolingRequest | None = None

    def discard(self, num_tokens: int) -> None:
        """Count tokens that were computed for the request but are not returned."""
        self.num_discarded_tokens += num_tokens

    @property
    def id(self) -> str:
        """The id in the response body, unique among responses."""
        return self.requests[0].request_id if self.pooling is None else self.pooling.request_id

    def cancel(self) -> None:
        """Cancel the request: its slots are free after the running step, and its client receives the reason."""
        self.exchange.end(RequestCancelled("The request was cancelled by the operator of this server."))

    async def stop_thinking(self, find_engine: Callable[[str], Engine | None]) -> int:
        """Close its reasoning; returns the number of choices affected.

        Args:
            find_engine: returns the engine that currently serves a model; a restart replaces it.

        Raises:
            NotThinking: no choice has open reasoning, or this engine cannot close it.
        """
        num_stopped = 0
        for running in self.assembly.running if self.assembly is not None else ():
            engine = find_engine(running.model.name)
            if isinstance(engine, Inspectable):
                num_stopped += await engine.stop_thinking(running.request.request_id)
        if not num_stopped:
            raise NotThinking(f"The request {self.id!r} has no open reasoning that could be closed.")
        return num_stopped


def list_answers(exchanges: Iterable[Exchange]) -> list[RunningAnswer]:
    """Return every response in progress, the oldest first."""
    answers = [exchange.answer for exchange in exchanges if exchange.answer is not None]
    return sorted(answers, key=lambda answer: answer.record.began)


def find_answer(exchanges: Iterable[Exchange], asked: str) -> RunningAnswer:
    """Return the response with that id, or that of the request to which its client gave that id.

    Raises:
        RequestNotRunning: there is none.
        InvalidRequest: several requests have that id.
    """
    answers = list_answers(exchanges)
    found = [answer for answer in answers if answer.id == asked]
    found = found or [answer for answer in answers if answer.record.request_id == asked]
    if not found:
        raise RequestNotRunning(f"No request with the id {quoted(asked, 200)} is running.")
    if len(found) > 1:
        ids = ", ".join(answer.id for answer in found[:8])
        raise InvalidRequest(f"{len(found)} requests came with this id; name one of their own: {ids}", "request_id")
    return found[0]


_BYTES_PER_TOKEN = 4
"""Typical for text and common vocabularies."""

_ANSWER_TOKENS = 256
"""Assumed length of a completion whose request sets no limit."""


def estimate_tokens(requests: Sequence[GenerateRequest]) -> int:
    """Estimate the tokens of prompts and completions, to be reserved until the requests have ended."""
    return sum(_prompt_tokens(one) + one.num_choices * _answer_tokens(one) for one in requests)


def num_tokens_of(request: PoolingRequest) -> int:
    """Estimate the tokens of a pooling request."""
    return sum(
        len(one.token_ids) if one.token_ids is not None else _num_tokens(one.text) + _num_tokens(one.second or "")
        for one in request.inputs
    )


def used_tokens(answer: RunningAnswer) -> int:
    """Return the tokens of prompts and completions, plus discarded tokens and those read to prepare requests."""
    assembly = answer.assembly
    if assembly is None:
        return answer.num_discarded_tokens
    return answer.num_discarded_tokens + num_read_tokens(assembly.running) + _answered(assembly)


def _answered(assembly: Assembly) -> int:
    """Return the engine's count if reported, else the count so far, estimated from text without tokens."""
    if len(assembly.finished) == assembly.num_prompts:
        return sum(event.usage.prompt_tokens + event.usage.completion_tokens for event in assembly.finished)
    started = [one for one in assembly.running if one.generation.has_started]
    prompts = sum(one.generation.num_prompt_tokens or _prompt_tokens(one.request) for one in started)
    return prompts + (assembly.num_tokens or sum(map(_num_tokens, _texts(assembly))))


def _texts(assembly: Assembly) -> Iterator[str]:
    """Yield all output so far."""
    for choice in assembly.choices:
        yield choice.text
        yield choice.reasoning
        yield from ("".join(call.arguments) for call in choice.calls)


def _prompt_tokens(request: GenerateRequest) -> int:
    if request.token_ids is not None:
        return len(request.token_ids)
    if request.messages is None:
        return _num_tokens(request.text or "")
    tools = request.tool_use.tools if request.tool_use is not None else ()
    return sum(_num_tokens(message.content) for message in request.messages) + sum(
        _num_tokens(str(tool.definition)) for tool in tools
    )


def _answer_tokens(request: GenerateRequest) -> int:
    limit = request.stopping.get("max_tokens")
    return _ANSWER_TOKENS if limit is None else int(limit)


def _num_tokens(text: str) -> int:
    """Estimate the tokens of a text; 0 for an empty one."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    return -(-num_bytes // _BYTES_PER_TOKEN)


_MAX_SHARED_CHARS = 2**24
_MAX_SHARED_MEMBERS = 2**17
"""Limits on the size of data shared by several prompts, multiplied by the number of prompts."""


@define
class MediaMemory:
    """Memory of the decoded media of a request, held until it has ended: the most that one of its attempts needs.

    The value of :attr:`enginehouse.contract.types.GenerateRequest.hold`.
    """

    _reservation: Reservation
    _num_bytes: int = 0

    def __call__(self, num_bytes: int) -> None:
        """Hold at least ``num_bytes``. Raises as :meth:`.Reservation.take`."""
        if num_bytes > self._num_bytes:
            self._reservation.take(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes


def check_request_sizes(requests: Sequence[GenerateRequest], limits: LimitsSettings) -> None:
    """Refuse what a small body could make large: choices, prompts, messages, and data that is sent with each prompt.

    Raises:
        InvalidRequest: there is too much of something.
    """
    first, num_prompts = requests[0], len(requests)
    for field, noun, number, most in (
        ("n", "choices", first.num_choices, limits.max_choices),
        ("prompt", "prompts", num_prompts, limits.max_prompts),
        ("messages", "messages", len(first.messages or ()), limits.max_messages),
    ):
        if number > most:
            raise InvalidRequest(f"{field}: this server allows at most {most} {noun}, not {number}", field)
    constraint, bias = first.constraint, first.sampling.get("logit_bias", ())
    if constraint is not None and num_prompts * len(constraint.text) > _MAX_SHARED_CHARS:
        most = _MAX_SHARED_CHARS // num_prompts
        message = f"with {num_prompts} prompts it may have at most {most} characters, not {len(constraint.text)}"
        raise InvalidRequest(f"{constraint.param}: {message}", constraint.param)
    if num_prompts * len(bias) > _MAX_SHARED_MEMBERS:
        most = _MAX_SHARED_MEMBERS // num_prompts
        message = f"with {num_prompts} prompts it may have at most {most} members, not {len(bias)}"
        raise InvalidRequest(f"logit_bias: {message}", "logit_bias")
