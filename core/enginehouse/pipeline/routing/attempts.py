"""The one loop that tries models: it goes on to the next one until a model has begun an answer that is accepted.

What a model has said is held back until it is taken, so nothing switches after the first byte. A model whose beginning
was not accepted is better than none: it is asked again, and taken, when all others have failed.
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
    """A model that was tried and did not answer, or whose beginning was not accepted."""

    model: str
    reason: str


@frozen(kw_only=True)
class Routed:
    """How a request got its model.

    Attributes:
        tried: models that were tried before.
        num_discarded_tokens: that those had made; nobody sees them, but they were computed.
    """

    strategy: str
    model: str
    reason: str
    tried: tuple[FailedAttempt, ...] = ()
    num_discarded_tokens: int = 0
    decision_s: float = 0.0


Submit = Callable[[str, bool], Awaitable[Generation]]
"""Brings the request to the model of that name, with log-probabilities or as it is; returns when it is accepted."""

OnDiscarded = Callable[[int], None]
"""Told of tokens that were computed for a request and stand in no answer, as soon as that is known."""


_BLAMELESS = (RequestKillsWorker, ModelNotReady, ModelUnloaded)
"""Errors of the engine of which the request is the cause, the operator, or a load that is under way."""


def with_logprobs(request: GenerateRequest) -> GenerateRequest:
    """The request, asking for log-probabilities too; they are taken out of its answer again where it did not."""
    return evolve(request, sampling={"num_logprobs": 0, **request.sampling})


async def run_attempts(
    plan: Plan, submit: Submit, experience: Experience, on_discarded: OnDiscarded = lambda num_tokens: None
) -> tuple[Generation, Routed]:
    """Try the models of a plan until one has begun; the very last one only has to accept the request.

    Raises:
        EnginehouseError: that of the last attempt, or one that every other model would give as well.
    """
    tries = _Tries(plan, submit, experience, on_discarded)
    generation = None
    while generation is None:
        generation = await tries.next()
    return generation, tries.routed()


class _Tries:
    """The attempts of one request.

    An attempt is judged while another one is left that may do better: what only stands in for a model that fails, or
    seems hopeless now, would not. Attempts that were not accepted wait behind all others but those at models that are
    left aside.
    """

    def __init__(self, plan: Plan, submit: Submit, experience: Experience, on_discarded: OnDiscarded) -> None:
        self._plan, self._submit, self._experience = plan, submit, experience
        self._on_discarded = on_discarded
        self._left = deque(plan.route.attempts)
        self._unsure: list[str] = []  # models whose beginning was not accepted
        self._failed: list[FailedAttempt] = []
        self._fault: EnginehouseError | None = None  # the last one that was a model's
        self._num_discarded = 0
        self._model = ""

    async def next(self) -> Generation | None:
        """Try the next model; None when it is not the one.

        Raises:
            EnginehouseError: no other one is left, or each would give the same.
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
                raise self._fault from error  # the request is not wrong: another model could answer it, were it there
            self._failed.append(FailedAttempt(attempt.model, error.public_message))
            return None
        except BaseException:
            trial.ended()
            raise
        # Whoever might have done better may be left aside by now.
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
        """The next attempt; models that are left aside, perhaps since the plan was made, are tried at the very end."""
        hopeful = next((other for other in self._left if not self._experience.has_failed(other.model)), None)
        if hopeful is None and self._unsure:
            return Attempt(self._unsure.pop())
        attempt = hopeful or self._left[0]
        self._left.remove(attempt)
        return attempt

    async def _begin(self, generation: BegunGeneration, accept: Acceptance | None) -> Probe:
        """Read the beginning of an answer; where that fails, or its client leaves meanwhile, nothing goes on."""
        try:
            return await _begin(generation, accept)
        except BaseException as error:
            generation.cancel()
            # What a model that fails has computed, or one that had not begun, is not its client's expense.
            if isinstance(error, asyncio.CancelledError) and generation.has_started:
                self._on_discarded(generation.num_prompt_tokens + generation.num_read_tokens)
            raise

    def routed(self) -> Routed:
        """How the model was found that was tried last."""
        return Routed(
            strategy=self._plan.strategy,
            model=self._model,
            reason=self._plan.route.reason,
            tried=tuple(self._failed),
            num_discarded_tokens=self._num_discarded,
            decision_s=self._plan.decision_s,
        )

    async def _submit_to(self, trial: Trial, *, is_probed: bool) -> BegunGeneration:
        """Bring the request to a model. Nobody waits here for the first words of the last one: then they are noted."""
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
        """Whether the next model is tried after this."""
        cannot = isinstance(error, UnsupportedParameter | ContextLengthExceeded)
        return _is_fault_of_model(error) or (cannot and model != self._plan.named)


async def _begin(generation: BegunGeneration, accept: Acceptance | None) -> Probe:
    """Read until the answer has begun, or so much of its first choice is there as its judge needs: what is judged."""
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
    """Say what an error means for the model that was tried: its failure is what made the request wait for nothing."""
    if isinstance(error, EngineError | QueueTimeout) and not isinstance(error, _BLAMELESS):
        trial.failed()
    else:
        trial.ended()


def _is_fault_of_model(error: EnginehouseError) -> bool:
    """Whether another model may do better. Not where workers die of the request: it must not reach another one."""
    if isinstance(error, RequestKillsWorker):
        return False
    return isinstance(error, EngineError | Overloaded | QueueTimeout | ModelNotFound)
