"""What an engine says of a request, step by step."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "CacheMiss",
    "CallDelta",
    "ChoiceFinished",
    "Event",
    "FinishReason",
    "HeldTokens",
    "PromptLogprobs",
    "ReasoningDelta",
    "RequestFinished",
    "TextDelta",
    "TokenLogprob",
    "TopLogprob",
    "WorkCounts",
]


FinishReason = Literal["stop", "length", "content_filter"]
"""``content_filter``: a remote engine left the rest of the answer out; engines of ours never do."""


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative at a position. ``logprob`` is the raw model's log-softmax value (natural log)."""

    token_id: int
    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The drawn token of one position and the most probable alternatives, best first."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class HeldTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a choice that are drawn and not visible: their text waits for the rest of a character or stop string.

    Attributes:
        logprobs: one entry per token id when the request asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class WorkCounts(msgspec.Struct, frozen=True, array_like=True):
    """What a request has spent and saved in its worker so far; the counts of :class:`RequestFinished`."""

    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_early_exit_tokens: int = 0
    num_skipped_layers: int = 0


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """New text of one choice.

    With ``held`` and ``probabilities`` a reader knows all that the choice's state is made of (see :class:`Resume`),
    with ``work`` what has been counted.

    Attributes:
        choice: index of the choice, 0-based.
        text: whole characters, never part of a stop string; may be empty when only tokens are reported.
        token_ids: the tokens that became visible with this text.
        logprobs: one entry per token id when the request asked for them.
        held: what is drawn and still invisible after this text; None when nothing is.
        probabilities: of the tokens drawn since the choice's last event, where a sampler follows its own draws; None
            stands for a token that was not drawn.
        exit_layers: how many layers each of ``token_ids`` ran through, where a model is left early; None stands for a
            token that was not drawn.
        work: the request's counts, of all choices; None where nothing is drafted and no layer skipped.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    held: HeldTokens | None = None
    probabilities: tuple[float | None, ...] = ()
    exit_layers: tuple[int | None, ...] = ()
    work: WorkCounts | None = None


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True, tag="reasoning"):
    """New reasoning of one choice, from an engine that takes messages."""

    choice: int
    text: str


class CallDelta(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A piece of one tool call of one choice, from an engine that takes messages.

    Attributes:
        call: index of the call in its choice, 0-based and without gaps.
        arguments: the next part of the arguments; may be empty.
        name: of the function, in the first piece of a call and only there.
    """

    choice: int
    call: int
    arguments: str = ""
    name: str | None = None


class ChoiceFinished(msgspec.Struct, frozen=True, array_like=True, tag="choice"):
    """A choice ended. ``num_tokens`` counts all generated tokens, hidden ones (stop text, end tokens) too.

    ``stop_reason`` is the stop string or end token id that ended it, or None for ``length`` and when a
    constraint was complete. ``num_reasoning_tokens`` are those of ``num_tokens`` between reasoning markers,
    ``num_forced_tokens`` those that a constraint forced, so that they were not sampled.
    """

    choice: int
    finish_reason: FinishReason
    num_tokens: int
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0
    num_forced_tokens: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """Log-probabilities of prompt tokens, in pieces and in order, from the second token on.

    ``ranks`` says of each token how many are at least as probable, itself included: 1 is the most probable one.
    """

    entries: tuple[TokenLogprob, ...]
    ranks: tuple[int, ...] = ()


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt leaves the kept sequence of its namespace that it shares the most with.

    Attributes:
        index: of the first prompt token that differs, 0-based.
        expected: bytes of the token that the kept sequence has there; None: it ends there.
        got: bytes of the prompt's token.
    """

    index: int
    expected: bytes | None
    got: bytes


class RequestFinished(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The last event of a request. Times are in seconds, measured in the worker.

    Attributes:
        num_prompt_tokens: tokens of the prompt, counted once however many choices.
        num_cached_tokens: of these, how many were reused from the prefix cache.
        num_completion_tokens: generated tokens over all choices, hidden ones too.
        num_forced_tokens: of these, how many a constraint forced, so that they were not sampled.
        num_drafted_tokens: guesses of drafters that were computed.
        num_accepted_tokens: of these, how many were right, so that they cost no forward pass of their own.
        num_early_exit_tokens: generated tokens that left the model before its last layer.
        num_skipped_layers: layers that these did not run through, all together.
        num_loaded_tokens: of the cached tokens, how many came from the disk tier.
        cache_miss: why no more of the prompt was cached; None when nothing was kept, or nothing differs.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_forced_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_early_exit_tokens: int = 0
    num_skipped_layers: int = 0
    num_loaded_tokens: int = 0
    cache_miss: CacheMiss | None = None


Event = PromptLogprobs | TextDelta | ReasoningDelta | CallDelta | ChoiceFinished | RequestFinished
