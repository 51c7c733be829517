"""The state of requests and sequences inside the engine.

A sequence *is* its token ids: everything else (KV positions, batch neighbours) can be rebuilt from them,
which is why preemption and restart only reset ``handle`` and ``num_computed``. The scheduler owns
``handle`` and ``num_computed``; the loop owns the rest. Nothing here calls a runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.types import CacheMiss, EngineRequest, TokenLogprob
from enginehouse.engine.constraints import ConstraintState, ReasoningGate, TokenMask
from enginehouse.engine.disk import StateRead
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.engine.text.text_stream import Piece, TextStream

if TYPE_CHECKING:
    from enginehouse.engine.speculation.speculation import SequenceDrafts

__all__ = ["ActiveRequest", "Sequence"]

_MAX_SCORED_LOGITS = 1 << 24
"""Logits that one scored prefill chunk may give (64 MiB of float32)."""


@define(eq=False)
class ActiveRequest:
    """A request that the engine holds, from ``add`` to its last event. Times are ``time.monotonic`` seconds."""

    request: EngineRequest
    prompt: NDArray[np.int32]  # (num_prompt_tokens,)
    arrival: int
    received_s: float
    sequences: list[Sequence] = field(factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int | None = None
    num_completion_tokens: int = 0
    num_forced_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_early_exit_tokens: int = 0
    num_skipped_layers: int = 0
    num_loaded_tokens: int = 0
    cache_miss: CacheMiss | None = None
    started_s: float | None = None
    first_token_s: float | None = None

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited for its start longer than it may."""
        limit_s = self.request.queue_timeout_s
        return limit_s is not None and self.started_s is None and now - self.received_s >= limit_s

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: served first comes first."""
        return (self.request.priority, self.arrival)


@define(eq=False)
class Sequence:
    """The token stream of one choice.

    Invariants: ``0 <= num_computed < length + num_pending <= max_length`` while running; ``handle`` is None exactly
    while waiting, and then ``num_computed == num_pending == 0``.

    Attributes:
        on_device: whether the runner itself draws this sequence's tokens.
        num_pending: tokens drawn on the device that have not been read yet.
        speculation: what its drafters know of it; None when nothing is drafted for it.
        drafts: guesses that the next step computes behind the last token.
        num_surplus: tokens that the runner holds beyond ``num_computed``: drafts that nobody has confirmed.
        num_confirmed: drafts that agreed in the last step.
        reads_at_once: whether each token must be read before the next step, because drafts go on from it.
        num_forced: tokens that a constraint forced.
        num_counted: generated tokens that count for its caller already.
        untold: probabilities of the tokens since the last event, where a sampler follows its draws.
        has_asked_disk: whether the disk tier was searched for a beginning of it.
        disk_read: such a beginning on its way into the prefix cache.
        exit_layer: how many layers the last row of logits ran through, where a model is left early.
        pending_exits: the same of each token since the last event; None for those that were not drawn.
    """

    owner: ActiveRequest
    choice: int
    buffer: NDArray[np.int32]  # (max_length,); the first ``length`` hold prompt and answer
    length: int
    sampler: SequenceSampler
    text: TextStream
    end_token_ids: frozenset[int] = frozenset()
    reasoning: ReasoningGate | None = None
    constraint: ConstraintState | None = None
    handle: int | None = None
    num_computed: int = 0
    num_scored: int = 0
    on_device: bool = False
    num_pending: int = 0
    num_forced: int = 0
    num_counted: int = 0
    pending_logprobs: deque[TokenLogprob] = field(factory=deque)
    speculation: SequenceDrafts | None = None
    drafts: Tokens[int] = ()
    num_surplus: int = 0
    num_confirmed: int = 0
    reads_at_once: bool = False
    untold: list[float | None] = field(factory=list)
    has_asked_disk: bool = False
    disk_read: StateRead | None = None
    exit_layer: int | None = None
    pending_exits: deque[int | None] = field(factory=deque)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(length,) int32 view of prompt and answer so far."""
        return self.buffer[: self.length]

    @property
    def max_length(self) -> int:
        """Tokens at which the sequence ends with finish reason ``length``."""
        return len(self.buffer)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return self.length - len(self.owner.prompt)

    @property
    def num_remaining(self) -> int:
        """Tokens that the runner has not seen: 1 while decoding, more while prefilling."""
        return self.length + self.num_pending - self.num_computed

    @property
    def is_drawn(self) -> bool:
        """Whether its last token is drawn and only has to be read."""
        return self.num_pending > 0 and self.length + self.num_pending == self.max_length

    @property
    def looks_back(self) -> bool:
        """Whether how a token is drawn depends on the tokens before it."""
        follows = self.sampler.penalties is not None or self.constraint is not None or self.reasoning is not None
        return follows or not self.may_end

    @property
    def is_sequential(self) -> bool:
        """Whether a token must be read before the next step: what may follow, or is drafted, depends on it."""
        return self.looks_back or self.reads_at_once

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still owed; only the first choice reports them."""
        wanted = self.owner.request.num_prompt_logprobs is not None and self.choice == 0
        return wanted and self.num_scored < len(self.owner.prompt) - 1

    @property
    def max_chunk(self) -> int:
        """Most tokens of a prefill chunk: few where every token gives a row of logits."""
        return max(1, _MAX_SCORED_LOGITS // self.sampler.vocab_size) if self.scores_prompt else len(self.buffer)

    @property
    def leader(self) -> Sequence:
        """The choice whose prefill the others share."""
        return self.owner.sequences[0]

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer proper has not begun yet."""
        return self.reasoning is not None and not self.reasoning.is_over

    @property
    def is_closing(self) -> bool:
        """Whether the next token is part of closing the reasoning by force."""
        return self.reasoning is not None and bool(self.reasoning.forced_token_ids())

    @property
    def may_end(self) -> bool:
        """Whether an end token may be drawn now."""
        if self.constraint is not None and self.is_reasoning:
            return False  # the constraint is still to be met
        return self.num_generated >= self.owner.request.stopping.min_tokens

    def mask(self) -> TokenMask | None:
        """What may be drawn next."""
        if self.reports_logprobs and (forced := self._closing_token_ids()):
            return TokenMask.only(forced[0], self.sampler.vocab_size)
        constraint = None if self.is_reasoning else self.constraint
        banned = frozenset() if self.may_end else self.end_token_ids
        if constraint is None and not banned:
            return None
        return TokenMask(constraint.bitmask() if constraint is not None else None, banned)

    def forced_token_ids(self) -> Iterable[int]:
        """Tokens that follow without being drawn, often none; log-probabilities want a draw for every token."""
        if self.reports_logprobs:
            return ()
        if self.is_reasoning or self.constraint is None:
            return self._closing_token_ids()
        return self.constraint.forced_token_ids()

    @property
    def reports_logprobs(self) -> bool:
        """Whether every token of the answer is reported with its log-probability."""
        return self.owner.request.sampling.num_logprobs is not None

    def _closing_token_ids(self) -> tuple[int, ...]:
        return self.reasoning.forced_token_ids() if self.reasoning is not None else ()

    def advance(self, token_id: int) -> Piece | None:
        """Add a token, which everything that looks back follows; None when the token ends the sequence.

        Raises:
            GenerationFailed: a plugin's step failed.
        """
        is_closing, reasoning = self.is_closing, self.reasoning
        self.buffer[self.length] = token_id
        self.length += 1
        self.sampler.accept(token_id)
        if self.sampler.follows_draws:
            self.untold.append(self.sampler.last_probability)
        if token_id in self.end_token_ids:
            return None
        if self.constraint is not None and not self.is_reasoning:
            self.constraint.accept(token_id)
        piece = self.text.push(token_id, is_reasoning=reasoning is not None and reasoning.is_inside)
        if reasoning is not None and not reasoning.is_over:
            reasoning.accept(token_id, is_closing)
        return piece

    def confirm_drafts(self) -> None:
        """Count drafted tokens as computed, as far as they are what was written."""
        while self.num_surplus and self.num_computed < self.length:
            if self.drafts[len(self.drafts) - self.num_surplus] != self.buffer[self.num_computed]:
                return
            self.num_computed += 1
            self.num_surplus -= 1
            self.num_confirmed += 1
            self.owner.num_accepted_tokens += 1
