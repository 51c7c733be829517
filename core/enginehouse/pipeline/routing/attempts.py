"""Attempt loop: tries models in order until one has started an answer that is accepted.

Output of a model is held back until the model is chosen, so no switch happens after the first byte. A model whose
beginning was rejected is kept as a fallback: when all others have failed, it is asked again and its answer is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import (
    AdapterNotFound,
    ContextLengthExceeded,
    EngineError,
    EnginehouseError,
    ModelNotFound,
    Overloaded,
    QueueTimeout,
    RequestKillsWorker,
    UnsupportedParameter,
)
from enginehouse.contract.router import Acceptance, AnswerBeginning, Attempt
from enginehouse.contract.types import (
    CallDelta,
    ChoiceFinished,
    Event,
    GenerateRequest,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    RequestFinished,
    TextDelta,
)
from enginehouse.pipeline.routing.circuit_breaker import CircuitBreaker, OutcomeRecorder
from enginehouse.pipeline.routing.planning import Plan
from enginehouse.recovery import Generation


@frozen
class FailedAttempt:
    """A model that was tried and did not answer, or whose beginning was rejected."""

    model: str
    reason: str


@frozen(kw_only=True)
class Routed:
    """Routing result of a request.

    Attributes:
        tried: models that were tried before.
        num_discarded_tokens: tokens computed by those models, which no client sees.
    """

    strategy: str
    model: str
    reason: str
    tried: tuple[FailedAttempt, ...] = ()
    num_discarded_tokens: int = 0
    decision_s: float = 0.0


class AcceptedRequest(Protocol):
    """A request that a model has accepted."""

    @property
    def generation(self) -> Generation:
        """Its answer."""


_A = TypeVar("_A", bound=AcceptedRequest)

StartFunction = Callable[[GenerateRequest, str, bool], Awaitable[_A]]
"""Starts a request on a model by name; returns when it is accepted.

The last argument allows to drop what the model does not support, where the settings permit that.
"""

OnDiscarded = Callable[[int], None]
"""Called with the number of computed tokens that are not part of any answer, as soon as that is known."""


_JUDGE = "is_good of its route"


def _with_logprobs(request: GenerateRequest) -> GenerateRequest:
    """Return the request with log-probabilities enabled; if not requested, they are removed from its answer again."""
    return evolve(request, sampling={"num_logprobs": 0, **request.sampling})


@define
class Attempts(Generic[_A]):
    """The attempts at one request.

    The beginning of an attempt is judged only while a remaining attempt may do better; last resorts and models that
    cannot answer now do not count. Rejected attempts are repeated after all others except those at models with an open
    circuit.
    """

    plan: Plan
    request: GenerateRequest
    start: StartFunction[_A]
    circuit_breaker: CircuitBreaker
    on_discarded: OnDiscarded = lambda num_tokens: None
    _left: deque[Attempt] = field(init=False)
    _unsure: list[str] = field(factory=list)  # models whose beginning was rejected
    _accepted: set[str] = field(factory=set)  # models that have accepted the request
    _failed: list[FailedAttempt] = field(factory=list)
    _fault: EnginehouseError | None = None  # last error that was the fault of a model
    _num_discarded: int = 0

    def __attrs_post_init__(self) -> None:
        self._left = deque(self.plan.route.attempts)

    async def run(self) -> tuple[_A, Routed]:
        """Try the models of the plan until one has started; the last one only has to accept the request.

        Raises:
            EnginehouseError: that of the last attempt, or one that every other model would raise as well.
        """
        while True:
            attempt = self._take()
            accepted = await self._try(attempt)
            if accepted is not None:
                return accepted, self._routed(attempt.model)

    async def _try(self, attempt: Attempt) -> _A | None:
        """Try a model; None if it failed or was rejected.

        Raises:
            EnginehouseError: no other model is left, or each would raise the same.
        """
        is_last = not (self._left or self._unsure)
        accept = attempt.accept if self._may_be_better() else None
        recorder = self.circuit_breaker.begin(attempt.model)
        with contextlib.ExitStack() as undo:
            undo.callback(recorder.ended)  # without effect after another outcome
            try:
                # Another model may support everything, unless the client named this one.
                may_drop = is_last or attempt.model == self.plan.named
                accepted = await self._start_at(recorder, is_probed=accept is not None, may_drop=may_drop)
                probe = await self._begin(accepted.generation, accept) if not is_last else None
            except EnginehouseError as error:
                recorder.raised(error)
                if not self._is_passed_over(attempt.model, error):
                    raise
                if _is_fault_of_model(error):
                    self._fault = error
                if is_last:
                    if self._fault is None or self._fault is error:
                        raise
                    raise self._fault from error  # the request is valid: another model could answer it if available
                self._failed.append(FailedAttempt(attempt.model, error.public_message))
                return None
            undo.pop_all()
        # Models that might have done better may have an open circuit by now.
        if probe is None or accept is None:
            return accepted
        if await self._is_good(accept, probe, accepted.generation) or not self._may_be_better():
            return accepted
        accepted.generation.cancel()
        num_tokens = _num_tokens_ahead(accepted.generation)
        self._num_discarded += num_tokens
        self.on_discarded(num_tokens)
        self._unsure.append(attempt.model)
        self._failed.append(FailedAttempt(attempt.model, "the beginning of its answer was not accepted"))
        self._left = deque(sorted(self._left, key=lambda other: other.model in self.plan.last_resorts))
        return None

    async def _is_good(self, accept: Acceptance, probe: AnswerBeginning, generation: Generation) -> bool:
        """Ask the router about the beginning of an answer, which is used if the router fails."""
        guard = self.plan.router
        if guard is None:
            return accept.is_good(probe)
        with contextlib.ExitStack() as undo:
            undo.callback(generation.cancel)
            try:
                is_good = await guard.run(_JUDGE, lambda: guard.call(_JUDGE, accept.is_good, probe))
            except EnginehouseError:
                is_good = True
            undo.pop_all()
        return is_good

    def _take(self) -> Attempt:
        """Return the next attempt; models with an open circuit, including those opened since planning, come last."""
        healthy = next((other for other in self._left if not self.circuit_breaker.has_failed(other.model)), None)
        if healthy is None and self._unsure:
            return Attempt(self._unsure.pop())
        attempt = healthy or self._left[0]
        self._left.remove(attempt)
        return attempt

    async def _begin(self, generation: Generation, accept: Acceptance | None) -> AnswerBeginning:
        """Read the beginning of an answer; on failure or cancellation, cancel the generation."""
        with contextlib.ExitStack() as undo:
            undo.callback(generation.cancel)
            try:
                probe = await _begin(generation, accept)
            except asyncio.CancelledError:
                # Tokens of a failed model, or of one that had not started, are not charged to the client.
                if generation.has_started:
                    self.on_discarded(generation.num_prompt_tokens + _num_tokens_ahead(generation))
                raise
            undo.pop_all()
        return probe

    def _routed(self, model: str) -> Routed:
        return Routed(
            strategy=self.plan.strategy,
            model=model,
            reason=self.plan.route.reason,
            tried=tuple(self._failed),
            num_discarded_tokens=self._num_discarded,
            decision_s=self.plan.decision_s,
        )

    async def _start_at(self, recorder: OutcomeRecorder, *, is_probed: bool, may_drop: bool) -> _A:
        """Start the request on a model; the generation reports its outcome, as nothing here waits for the last one."""
        request = _with_logprobs(self.request) if is_probed else self.request
        if recorder.model in self._accepted:  # the engine may still hold the first attempt, which had this id
            request = evolve(request, request_id=f"{request.request_id}-again")
        accepted = await self.start(request, recorder.model, may_drop)
        self._accepted.add(recorder.model)
        accepted.generation.hides_logprobs = is_probed and not self.plan.has_logprobs
        accepted.generation.outcome_observer = recorder
        return accepted

    def _may_be_better(self) -> bool:
        return any(
            other.model not in self.plan.last_resorts and not self.circuit_breaker.has_failed(other.model)
            for other in self._left
        )

    def _is_passed_over(self, model: str, error: EnginehouseError) -> bool:
        """True if the next model is tried after this error."""
        cannot = isinstance(error, UnsupportedParameter | ContextLengthExceeded | AdapterNotFound)
        return _is_fault_of_model(error) or (cannot and model != self.plan.named)


async def _begin(generation: Generation, accept: Acceptance | None) -> AnswerBeginning:
    """Read until the answer has started, or until the judge has enough tokens of the first choice; return these."""
    wanted = 1 if accept is None else accept.num_tokens
    texts: list[str] = []
    logprobs: list[float] = []
    num_judged, is_whole = 0, False
    while num_judged < wanted and not is_whole:
        batch = await generation.read_ahead()
        is_whole = batch is None
        for event in batch or ():
            if isinstance(event, RequestFinished):
                is_whole = True
            elif isinstance(event, PromptLogprobs | PromptProgress) or event.choice != 0:
                continue
            elif isinstance(event, TextDelta):
                texts.append(event.text)
                logprobs += [token.logprob for token in event.logprobs or ()]
            is_whole = is_whole or isinstance(event, ChoiceFinished)
            num_judged += _num_tokens(event)
    return AnswerBeginning("".join(texts), tuple(logprobs[:wanted]), is_whole)


def _num_tokens_ahead(generation: Generation) -> int:
    return sum(_num_tokens(event) for batch in generation.ahead for event in batch)


def _num_tokens(event: Event) -> int:
    """Return the number of tokens in an event; at least one for engines that do not report token ids."""
    if isinstance(event, TextDelta):
        return max(1, len(event.token_ids))
    return 1 if isinstance(event, ReasoningDelta | CallDelta) else 0


def _is_fault_of_model(error: EnginehouseError) -> bool:
    """True if another model may do better. False if the request kills workers: it must not reach another model."""
    if isinstance(error, RequestKillsWorker):
        return False
    return isinstance(error, EngineError | Overloaded | QueueTimeout | ModelNotFound)
