"""Events that an engine reports about a request."""

from __future__ import annotations

from typing import Literal

import msgspec

from enginehouse.contract.usage import Usage

__all__ = [
    "CacheMiss",
    "CallDelta",
    "ChoiceFinished",
    "Event",
    "FinishReason",
    "HeldTokens",
    "PromptLogprobs",
    "PromptProgress",
    "ReasoningDelta",
    "RequestFinished",
    "TextDelta",
    "TokenDetails",
    "TokenLogprob",
    "TopLogprob",
]


FinishReason = Literal["stop", "length", "content_filter"]
"""``content_filter``: a remote engine withheld the rest of the answer; local engines never report it."""


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative at a position. ``logprob`` is the raw model's log-softmax value (natural log)."""

    token_id: int
    token: bytes
    logprob: float


class TokenDetails(msgspec.Struct, frozen=True, array_like=True):
    """Origin of a generated token.

    Attributes:
        forced: its constraint, or the end of its reasoning, allowed no other token.
        drafted_by: name of the drafter that proposed it; None if it was not drafted.
        exit_layer: number of layers that it ran through, for models with early exit; else None.
        resumed: it was generated after its request continued in another worker.
    """

    forced: bool = False
    drafted_by: str | None = None
    exit_layer: int | None = None
    resumed: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The sampled token of one position and the most probable alternatives, best first.

    ``details`` are those of a generated token whose request asks for them, else None.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    details: TokenDetails | None = None


class HeldTokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled but not yet visible tokens of a choice: their text may be part of a character or stop string.

    Attributes:
        logprobs: one entry per token id if the request asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """New text of one choice.

    ``held`` and ``probabilities`` complete the state of the choice (see :class:`.Resume`).

    Attributes:
        choice: index of the choice, 0-based.
        text: whole characters, never part of a stop string; may be empty if only tokens are reported.
        token_ids: the tokens that became visible with this text; the last event of a choice also lists those of an
            incomplete character at its end, which is not part of the text.
        logprobs: one entry per token id if the request asked for them.
        held: tokens that are sampled but still invisible after this text; None if there are none.
        probabilities: of the tokens sampled since the choice's last event, if a sampler depends on previous draws; None
            for a token that was not sampled.
        work: the request's work in this worker so far (fields of usage with ``is_work``); None if there is none.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    held: HeldTokens | None = None
    probabilities: tuple[float | None, ...] = ()
    work: Usage | None = None


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
    """End of a choice.

    Attributes:
        usage: completion tokens, including hidden ones (stop text, end tokens), with the reasoning and forced ones.
        stop_reason: stop string or end token id that ended it; None for ``length`` and if a constraint was complete.
        token_ids: the last tokens, which never become visible (stop text, end token), if the request has
            ``return_token_ids``.
    """

    choice: int
    finish_reason: FinishReason
    usage: Usage = Usage()
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="prompt"):
    """Log-probabilities of prompt tokens, in several events and in order, from the second token on.

    ``ranks`` holds for each token the number of tokens that are at least as probable, itself included: 1 is the most
    probable.
    """

    entries: tuple[TokenLogprob, ...]
    ranks: tuple[int, ...] = ()


class PromptProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Progress of the prefill of a request that asks for it, once per step.

    Attributes:
        num_tokens: tokens of the prompt.
        num_done: tokens that are computed or were cached.
        num_cached: tokens that the prefix cache held.
        seconds: since the request left the queue.
    """

    num_tokens: int
    num_done: int
    num_cached: int
    seconds: float


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
    """The last event of a request.

    Attributes:
        usage: of the prompt, counted once, and all choices.
        cache_miss: why no more of the prompt was cached; None if nothing was cached, or nothing differs.
    """

    usage: Usage
    cache_miss: CacheMiss | None = None


Event = PromptProgress | PromptLogprobs | TextDelta | ReasoningDelta | CallDelta | ChoiceFinished | RequestFinished
"""Events of a request, as an engine reports them."""
