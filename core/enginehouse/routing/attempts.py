"""The one loop that tries models: it goes on to the next one until a model has begun an answer that is accepted.

What a model has said is held back until it is taken, so nothing switches after the first byte.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import msgspec
from attrs import evolve, frozen

from enginehouse.backend import Generation
from enginehouse.errors import (
    ContextLengthExceeded,
    EngineError,
    EnginehouseError,
    ModelNotFound,
    Overloaded,
    RequestKillsWorker,
    UnsupportedParameter,
)
from enginehouse.router import Acceptance, Probe
from enginehouse.routing.experience import Experience
from enginehouse.routing.planning import Plan
from enginehouse.types import (
    CallDelta,
    ChoiceFinished,
    Event,
    GenerateRequest,
    ReasoningDelta,
    RequestFinished,
    TextDelta,
)

__all__ = ["BegunGeneration", "FailedAttempt", "Routed", "Submit", "run_attempts", "with_logprobs"]


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


class BegunGeneration:
    """A generation whose first batches have been read already. Implements :class:`enginehouse.backend.Generation`."""

    def __init__(self, generation: Generation, *, shows_logprobs: bool) -> None:
        self.num_prompt_tokens = generation.num_prompt_tokens
        self._shows_logprobs = shows_logprobs
        self._generation = generation
        self._iterator = generation.__aiter__()
        self._held: list[Sequence[Event]] = []
        self._is_over = False

    @property
    def num_replays(self) -> int:
        """How often the request went on in another worker."""
        return getattr(self._generation, "num_replays", 0)

    async def read(self) -> Sequence[Event]:
        """One batch more, which is held back; empty when there is none. Raises what the generation raises."""
        try:
            batch = await anext(self._iterator)
        except StopAsyncIteration:
            self._is_over = True
            return ()
        self._held.append(batch)
        return batch

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Everything, what was held back first."""
        try:
            while self._held:
                yield self._shown(self._held.pop(0))
            if not self._is_over:
                async for batch in self._iterator:
                    yield self._shown(batch)
        finally:
            self.cancel()

    def _shown(self, batch: Sequence[Event]) -> Sequence[Event]:
        """The batch without what only the probe needed."""
        if self._shows_logprobs:
            return batch
        return [
            msgspec.structs.replace(event, logprobs=None) if isinstance(event, TextDelta) else event for event in batch
        ]

    def cancel(self) -> None:
        """Stop generating; idempotent."""
        self._generation.cancel()


Submit = Callable[[str, bool], Awaitable[Generation]]
"""Brings the request to the model of that name, with log-probabilities or as it is; returns when it is accepted."""


def with_logprobs(request: GenerateRequest) -> GenerateRequest:
    """The request, asking for log-probabilities too; they are taken out of its answer again where it did not."""
    return evolve(request, sampling={"num_logprobs": 0, **request.sampling})


async def run_attempts(plan: Plan, submit: Submit, experience: Experience) -> tuple[Generation, Routed]:
    """Try the models of a plan until one has begun; the last one only has to accept the request.

    Raises:
        EnginehouseError: that of the last attempt, or one that every other model would give as well.
    """
    failed: list[FailedAttempt] = []
    num_discarded = 0
    *others, last = plan.route.attempts
    for attempt in others:
        began = time.perf_counter()
        try:
            accepted = await submit(attempt.model, attempt.accept is not None)
            generation = BegunGeneration(accepted, shows_logprobs=plan.has_logprobs)
            with _cancelling(generation):
                probe, num_tokens = await _begin(generation, attempt.accept)
        except EnginehouseError as error:
            if _is_fault_of_model(error):
                experience.failed(attempt.model)
            elif not (plan.is_free and isinstance(error, UnsupportedParameter | ContextLengthExceeded)):
                raise
            failed.append(FailedAttempt(attempt.model, error.message))
            continue
        experience.answered(attempt.model, time.perf_counter() - began)
        if attempt.accept is None or attempt.accept.is_good(probe):
            return generation, _routed(plan, attempt.model, failed, num_discarded)
        generation.cancel()
        num_discarded += num_tokens
        failed.append(FailedAttempt(attempt.model, "how its answer began was not accepted"))
    try:
        return await submit(last.model, False), _routed(plan, last.model, failed, num_discarded)
    except EnginehouseError as error:
        if _is_fault_of_model(error):
            experience.failed(last.model)
        raise


def _routed(plan: Plan, model: str, failed: Sequence[FailedAttempt], num_discarded: int) -> Routed:
    return Routed(
        strategy=plan.strategy,
        model=model,
        reason=plan.route.reason,
        tried=tuple(failed),
        num_discarded_tokens=num_discarded,
        decision_s=plan.decision_s,
    )


async def _begin(generation: BegunGeneration, accept: Acceptance | None) -> tuple[Probe, int]:
    """Read until the answer has begun, or so much of it is there as its judge needs."""
    wanted = 1 if accept is None else accept.num_tokens
    texts: list[str] = []
    logprobs: list[float] = []
    num_tokens, is_whole = 0, False
    while num_tokens < wanted and not is_whole:
        batch = await generation.read()
        is_whole = not batch
        for event in batch:
            if isinstance(event, TextDelta) and event.choice == 0:
                texts.append(event.text)
                num_tokens += max(1, len(event.token_ids))
                logprobs += [token.logprob for token in event.logprobs or ()]
            elif isinstance(event, ChoiceFinished | RequestFinished):
                is_whole = True
            elif isinstance(event, ReasoningDelta | CallDelta):
                num_tokens += 1
    return Probe("".join(texts), tuple(logprobs[:wanted]), is_whole), num_tokens


@contextlib.contextmanager
def _cancelling(generation: BegunGeneration) -> Iterator[None]:
    """Cancel the generation where the block is left by an exception, also because its client has left."""
    try:
        yield
    except BaseException:
        generation.cancel()
        raise


def _is_fault_of_model(error: EnginehouseError) -> bool:
    """Whether another model may do better. Not where workers die of the request: it must not reach another one."""
    if isinstance(error, RequestKillsWorker):
        return False
    return isinstance(error, EngineError | Overloaded | ModelNotFound)
