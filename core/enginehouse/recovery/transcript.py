"""Progress of a request, recorded from its events, so that it can continue seamlessly in another worker.

Events are recorded when they arrive, before they are read, so that a slow client neither loses nor repeats any.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field
from msgspec.structs import replace

from enginehouse.contract.types import (
    CacheMiss,
    ChoiceFinished,
    EngineRequest,
    Event,
    HeldTokens,
    PromptLogprobs,
    RequestFinished,
    Resume,
    ResumedChoice,
    TextDelta,
)
from enginehouse.contract.usage import Usage

__all__ = ["Transcript"]


@define(eq=False)
class _Choice:
    """The reported part of one choice; see :class:`ResumedChoice`."""

    token_ids: list[int] = field(factory=list)
    held: HeldTokens | None = None
    probabilities: list[float | None] = field(factory=list)
    finished: ChoiceFinished | None = None

    def resumed(self, index: int) -> ResumedChoice:
        held = self.held or HeldTokens(())
        token_ids = (*self.token_ids, *held.token_ids)
        return ResumedChoice(index, token_ids, held.logprobs, tuple(self.probabilities))


class Transcript:
    """Transcript of one request.

    Args:
        request: the request that is answered.
        clock: seconds, monotonic.

    Attributes:
        num_tokens: number of visible tokens of the answer so far, over all choices.
        is_finished: True if the last event has arrived.
    """

    def __init__(self, request: EngineRequest, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices = [_Choice() for _ in range(request.num_choices)]
        self._num_stays = 0
        self._num_scored = 0
        self._at_start = Usage()
        self._cache_miss: CacheMiss | None = None
        self._work_before = Usage()  # in all previous attempts
        self._work = Usage()  # in the current attempt
        self._is_thinking_stopped = False
        self._accepted_s: float | None = None
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self.num_tokens = 0
        self.is_finished = False

    def begin_stay(self) -> Resume | None:
        """Begin an attempt in a worker; returns the progress of the previous ones, or None for the first."""
        self._num_stays += 1
        self._work_before, self._work = self._work_before + self._work, Usage()
        if self._num_stays == 1:
            return None
        choices = tuple(choice.resumed(i) for i, choice in enumerate(self._choices) if choice.finished is None)
        return Resume(choices, self._num_scored, self._is_thinking_stopped)

    def accepted(self) -> None:
        """A worker has accepted the request."""
        if self._accepted_s is None:
            self._accepted_s = self._clock()

    def started(self, usage: Usage, cache_miss: CacheMiss | None = None) -> None:
        """The request has left the queue. Only the first prefix cache hit counts: later ones find its own tokens."""
        if self._started_s is None:
            self._started_s = self._clock()
            self._at_start, self._cache_miss = usage, cache_miss

    def thinking_stopped(self) -> None:
        """The end of its reasoning has been forced."""
        self._is_thinking_stopped = True

    def record(self, event: Event) -> Event:
        """Record an event; returns the event to pass to the reader."""
        if isinstance(event, TextDelta):
            choice = self._choices[event.choice]
            choice.token_ids += event.token_ids
            choice.held = event.held
            if event.probabilities:
                choice.probabilities += event.probabilities
            self.num_tokens += len(event.token_ids)
            if event.work is not None:
                self._work = event.work
            if self._first_token_s is None and self._started_s is not None:  # tokens may be forced before the start
                self._first_token_s = self._clock()
        elif isinstance(event, ChoiceFinished):
            self._choices[event.choice].finished = event
        elif isinstance(event, PromptLogprobs):
            self._num_scored += len(event.entries)
        elif isinstance(event, RequestFinished):
            self.is_finished = True
            return event if self._num_stays == 1 else self._summary(event)
        return event

    def _summary(self, event: RequestFinished) -> RequestFinished:
        """Combine the statistics of all attempts; a pause counts towards the phase in which it occurred."""
        now_s = self._clock()
        accepted_s = self._accepted_s if self._accepted_s is not None else now_s
        started_s = self._started_s if self._started_s is not None else now_s
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        answer = sum((choice.finished.usage for choice in self._choices if choice.finished is not None), Usage())
        usage = replace(
            self._work_before + event.usage,
            cached_tokens=self._at_start.cached_tokens,
            loaded_prompt_tokens=self._at_start.loaded_prompt_tokens,
            completion_tokens=answer.completion_tokens,
            reasoning_tokens=answer.reasoning_tokens,
            forced_tokens=answer.forced_tokens,
            queue_s=started_s - accepted_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
        )
        return RequestFinished(usage, self._cache_miss)
