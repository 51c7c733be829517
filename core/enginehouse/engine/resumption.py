"""Brings new sequences to where others have come that ended with their worker, or were taken out of this one.

A sequence is its token ids: everything that follows them (text, penalties, grammar, reasoning, samplers with a state)
follows them once more, and the runner will be given them as a prompt. What was reported is not reported again. Called
by the loop while a request enters; calls no runner.
"""

from __future__ import annotations

from collections import deque

from enginehouse.contract.types import Resume, ResumedChoice
from enginehouse.engine.sequence import ActiveRequest, Sequence

__all__ = ["restore"]


def restore(owner: ActiveRequest, resume: Resume, now_s: float) -> None:
    """Bring a request's new sequences, one for each choice of ``resume``, to where that says they were.

    Raises:
        Exception: whatever a grammar or a sampler raises on a token that it allowed before.
    """
    for sequence, told in zip(owner.sequences, resume.choices, strict=True):
        _restore(sequence, told, is_thinking_stopped=resume.is_thinking_stopped)
        owner.num_completion_tokens += len(told.token_ids)
        owner.num_forced_tokens += sequence.num_forced
        if told.token_ids:
            owner.first_token_s = now_s
        if sequence.choice == 0:
            sequence.num_scored = resume.num_scored
        if resume.is_thinking_stopped and sequence.reasoning is not None:
            sequence.reasoning.close_now()


def _restore(sequence: Sequence, told: ResumedChoice, *, is_thinking_stopped: bool) -> None:
    forced: deque[int] = deque()
    reasoning = sequence.reasoning if is_thinking_stopped else None
    probabilities = told.probabilities or (None,) * len(told.token_ids)
    for index, (token_id, probability) in enumerate(zip(told.token_ids, probabilities, strict=True)):
        if reasoning is not None and reasoning.is_closed_by(told.token_ids[index:]):
            reasoning.close_now()  # it was here that somebody stopped it
        if not forced:
            forced.extend(sequence.forced_token_ids())
        if forced:  # it was not drawn then, and is not counted as drawn now
            forced.popleft()
            sequence.num_forced += 1
        sequence.sampler.recall(token_id, probability)
        sequence.advance(token_id)
    sequence.untold.clear()
    sequence.pending_logprobs.extend(told.held_logprobs)
    sequence.pending_exits.extend([None] * len(sequence.text.pending_token_ids))
