"""Attempt loop: tries models in order until one has begun an answer that is accepted.

Output of a model is held back until the model is chosen, so no switch happens after the first byte. A model whose
beginning was rejected is kept as a fallback: when all others have failed, it is asked again and its answer is used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from attrs import evolve, frozen

from enginehouse.contract.backend import Generation
from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineError,
    EnginehouseError,
    ModelNotFound,
    ModelNotReady,
    ModelUnloaded,
    Overloaded,
    QueueTimeout,
    RequestKillsWorker,
    UnsupportedParameter,
)
from enginehouse.contract.router import Acceptance, Attempt, Probe
from enginehouse.contract.types import ChoiceFinished, GenerateRequest, RequestFinished, TextDelta
from enginehouse.pipeline.routing.begun import BegunGeneration, num_tokens_of
from enginehouse.pipeline.routing.experience import Experience, Trial
from enginehouse.pipeline.routing.planning import Plan

__all__ = ["FailedAttempt", "OnDiscarded", "Routed", "Submit", "run_attempts", "with_logprobs"]


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


Submit = Callable[[str, bool], Awaitable[Generation]]
"""Submits the request to a model by name, with or without added log-probabilities; returns when it is accepted."""

OnDiscarded = Callable[[int], None]
"""Called with the number of computed tokens that are not part of any answer, as soon as that is known."""


_BLAMELESS = (RequestKillsWorker, ModelNotReady, ModelUnloaded)
"""Engine errors caused by the request, by the operator, or by a load in progress."""


def with_logprobs(request: GenerateRequest) -> GenerateRequest:
    """Return the request with log-probabilities enabled; if not requested, they are removed from its answer again."""
    return evolve(request, sampling={"num_logprobs": 0, **request.sampling})


async def run_attempts(
    plan: Plan, submit: Submit, experience: Experience, on_discarded: OnDiscarded = lambda num_tokens: None
) -> tuple[Generation, Routed]:
    """Try the models of a plan until one has begun; the last one only has to accept the request.

    Raises:
        EnginehouseError: that of the last attempt, or one that every other model would raise as well.
    """
    tries = _Tries(plan, submit, experience, on_discarded)
    generation = None
    while generation is None:
        generation = await tries.next()
    return generation, tries.routed()


class _Tries:
    """The attempts of one request.

    The beginning of an attempt is judged only while a remaining attempt may do better; last resorts and models that
    cannot answer now do not count. Rejected attempts are repeated after all others except those at models with an open
    circuit.
    """

    def __init__(self, plan: Plan, submit: Submit, experience: Experience, on_discarded: OnDiscarded) -> None:
        self._plan, self._submit, self._experience = plan, submit, experience
        self._on_discarded = on_discarded
        self._left = deque(plan.route.attempts)
        self._unsure: list[str] = []  # models whose beginning was rejected
        self._failed: list[FailedAttempt] = []
        self._fault: EnginehouseError | None = None  # last error that was the fault of a model
        self._num_discarded = 0
        self._model = ""

    async def next(self) -> Generation | None:
        """Try the next model; None if it failed or was rejected.

        Raises:
            EnginehouseError: no other model is left, or each would raise the same.
        """
        attempt = self._take()
        self._model, is_last = attempt.model, not (self._left or self._unsure)
        accept = attempt.accept if self._may_be_better() else None
        trial = self._experience.begin(attempt.model)
        try:
            generation = await self._submit_to(trial, is_probed=accept is not None)
            if is_last:
                return generation
            probe = await self._begin(generation, accept)
        except EnginehouseError as error:
            _conclude(trial, error)
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
        except BaseException:
            trial.ended()
            raise
        # Models that might have done better may have an open circuit by now.
        if accept is None or accept.is_good(probe) or not self._may_be_better():
            return generation
        generation.cancel()
        self._num_discarded += generation.num_read_tokens
        self._on_discarded(generation.num_read_tokens)
        self._unsure.append(attempt.model)
        self._failed.append(FailedAttempt(attempt.model, "how its answer began was not accepted"))
        self._left = deque(sorted(self._left, key=lambda other: other.model in self._plan.last_resorts))
        return None

    def _take(self) -> Attempt:
        """Return the next attempt; models with an open circuit, including those opened since planning, come last."""
        hopeful = next((other for other in self._left if not self._experience.has_failed(other.model)), None)
        if hopeful is None and self._unsure:
            return Attempt(self._unsure.pop())
        attempt = hopeful or self._left[0]
        self._left.remove(attempt)
        return attempt

    async def _begin(self, generation: BegunGeneration, accept: Acceptance | None) -> Probe:
        """Read the beginning of an answer; on failure or cancellation, cancel the generation."""
        try:
            return await _begin(generation, accept)
        except BaseException as error:
            generation.cancel()
            # Tokens of a failed model, or of one that had not begun, are not charged to the client.
            if isinstance(error, asyncio.CancelledError) and generation.has_started:
                self._on_discarded(generation.num_prompt_tokens + generation.num_read_tokens)
            raise

    def routed(self) -> Routed:
        """Return the routing result for the model tried last."""
        return Routed(
            strategy=self._plan.strategy,
            model=self._model,
            reason=self._plan.route.reason,
            tried=tuple(self._failed),
            num_discarded_tokens=self._num_discarded,
            decision_s=self._plan.decision_s,
        )

    async def _submit_to(self, trial: Trial, *, is_probed: bool) -> BegunGeneration:
        """Submit the request to a model; callbacks record the outcome, as nothing waits for the last model here."""
        return BegunGeneration(
            await self._submit(trial.model, is_probed),
            shows_logprobs=not is_probed or self._plan.has_logprobs,
            on_begun=trial.answered,
            on_failed=lambda error: _conclude(trial, error),
            on_end=trial.ended,
        )

    def _may_be_better(self) -> bool:
        return any(
            other.model not in self._plan.last_resorts and not self._experience.has_failed(other.model)
            for other in self._left
        )

    def _is_passed_over(self, model: str, error: EnginehouseError) -> bool:
        """True if the next model is tried after this error."""
        cannot = isinstance(error, UnsupportedParameter | ContextLengthExceeded)
        return _is_fault_of_model(error) or (cannot and model != self._plan.named)


async def _begin(generation: BegunGeneration, accept: Acceptance | None) -> Probe:
    """Read until the answer has begun, or until the judge has enough tokens of the first choice; return these."""
    wanted = 1 if accept is None else accept.num_tokens
    texts: list[str] = []
    logprobs: list[float] = []
    num_judged, is_whole = 0, False
    while num_judged < wanted and not is_whole:
        batch = await generation.read()
        is_whole = batch is None
        for event in batch or ():
            if isinstance(event, RequestFinished):
                is_whole = True
            elif getattr(event, "choice", 0) != 0:
                continue
            elif isinstance(event, TextDelta):
                texts.append(event.text)
                logprobs += [token.logprob for token in event.logprobs or ()]
            is_whole = is_whole or isinstance(event, ChoiceFinished)
            num_judged += num_tokens_of(event)
    return Probe("".join(texts), tuple(logprobs[:wanted]), is_whole)


def _conclude(trial: Trial, error: EnginehouseError) -> None:
    """Record the outcome of an error: a failure only if the model is at fault and made the request wait in vain."""
    if isinstance(error, EngineError | QueueTimeout) and not isinstance(error, _BLAMELESS):
        trial.failed()
    else:
        trial.ended()


def _is_fault_of_model(error: EnginehouseError) -> bool:
    """True if another model may do better. False if the request kills workers: it must not reach another model."""
    if isinstance(error, RequestKillsWorker):
        return False
    return isinstance(error, EngineError | Overloaded | QueueTimeout | ModelNotFound)
