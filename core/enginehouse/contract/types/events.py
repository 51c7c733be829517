"""Events that an engine reports about a request."""

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
"""``content_filter``: a remote engine withheld the rest of the answer; local engines never report it."""


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative at a position. ``logprob`` is the raw model's log-softmax value (natural log)."""

    token_id: int
    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The sampled token of one position and the most probable alternatives, best first."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class HeldTokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled but not yet visible tokens of a choice: their text may be part of a character or stop string.

    Attributes:
        logprobs: one entry per token id if the request asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class WorkCounts(msgspec.Struct, frozen=True, array_like=True):
    """Speculation and early exit counts of a request in its worker so far, as in :class:`RequestFinished`."""

    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_early_exit_tokens: int = 0
    num_skipped_layers: int = 0


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """New text of one choice.

    ``held`` and ``probabilities`` complete the state of the choice (see :class:`Resume`); ``work`` carries the counts
    so far.

    Attributes:
        choice: index of the choice, 0-based.
        text: whole characters, never part of a stop string; may be empty if only tokens are reported.
        token_ids: the tokens that became visible with this text.
        logprobs: one entry per token id if the request asked for them.
        held: tokens that are sampled but still invisible after this text; None if there are none.
        probabilities: of the tokens sampled since the choice's last event, if a sampler depends on previous draws; None
            for a token that was not sampled.
        exit_layers: number of layers that each of ``token_ids`` ran through, for models with early exit; None for a
            token that was not sampled.
        work: the request's counts, over all choices; None without drafting and early exit.
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
    """New reasoning text of one choice, from an engine that takes messages."""

    choice: int
    text: str


class CallDelta(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A fragment of one tool call of one choice, from an engine that takes messages.

    Attributes:
        call: index of the call in its choice, 0-based and without gaps.
        arguments: the next part of the arguments; may be empty.
        name: of the function, in the first fragment of a call and only there.
    """

    choice: int
    call: int
    arguments: str = ""
    name: str | None = None


class ChoiceFinished(msgspec.Struct, frozen=True, array_like=True, tag="choice"):
    """End of a choice. ``num_tokens`` counts all generated tokens, including hidden ones (stop text, end tokens).

    ``stop_reason`` is the stop string or end token id that ended it, or None for ``length`` and if a constraint was
    complete. ``num_reasoning_tokens`` counts those of ``num_tokens`` between reasoning markers, ``num_forced_tokens``
    those that a constraint forced, so that they were not sampled.
    """

    choice: int
    finish_reason: FinishReason
    num_tokens: int
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0
    num_forced_tokens: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """Log-probabilities of prompt tokens, in several events and in order, from the second token on.

    ``ranks`` holds for each token the number of tokens that are at least as probable, itself included: 1 is the most
    probable.
    """

    entries: tuple[TokenLogprob, ...]
    ranks: tuple[int, ...] = ()


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """First difference between a prompt and the cached sequence of its namespace with the longest common prefix.

    Attributes:
        index: of the first prompt token that differs, 0-based.
        expected: bytes of the cached sequence's token there; None if it ends there.
        got: bytes of the prompt's token.
    """

    index: int
    expected: bytes | None
    got: bytes


class RequestFinished(msgspec.Struct, frozen=True, array_like=True, tag="request"):
    """The last event of a request. Times are in seconds, measured in the worker.

    Attributes:
        num_prompt_tokens: tokens of the prompt, counted once for all choices.
        num_cached_tokens: prompt tokens that were reused from the prefix cache.
        num_completion_tokens: generated tokens over all choices, including hidden ones.
        num_forced_tokens: generated tokens that a constraint forced, so that they were not sampled.
        num_drafted_tokens: draft tokens that were computed.
        num_accepted_tokens: draft tokens that were accepted, so that they needed no forward pass of their own.
        num_early_exit_tokens: generated tokens that exited the model before its last layer.
        num_skipped_layers: total number of layers that these tokens did not run through.
        num_loaded_tokens: cached tokens that came from the disk tier.
        cache_miss: why no more of the prompt was cached; None if nothing was cached, or nothing differs.
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
