"""State of requests and sequences inside the engine.

A sequence *is* its token ids: all other state (KV positions, batch neighbours) can be rebuilt from them, so preemption
and restart only reset ``handle`` and ``num_computed``. The scheduler owns ``handle`` and ``num_computed``; the loop
owns the rest. Nothing here calls a runner.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np
from attrs import Factory, define, field
from numpy.typing import NDArray

from enginehouse.contract.adapters import AdapterSet, cache_key
from enginehouse.contract.media import Embedding
from enginehouse.contract.types import CacheMiss, EngineRequest, TokenDetails, TokenLogprob
from enginehouse.contract.usage import Usage, UsageCounter
from enginehouse.engine.constraints import ConstraintState, ReasoningGate, TokenMask
from enginehouse.engine.disk import StateRead
from enginehouse.engine.media import PlacedChunk
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse.engine.text.text_stream import TextPiece, TextStream
from enginehouse.plugins import Contained

if TYPE_CHECKING:
    from enginehouse.engine.speculation.speculation import SequenceDrafts


_MAX_SCORED_LOGITS = 1 << 24
"""Maximum number of logits in one scored prefill chunk (64 MiB of float32)."""


@define(eq=False)
class ActiveRequest:
    """A request in the engine, from ``add`` to its last event. Times are ``time.monotonic`` seconds.

    Attributes:
        chunks: images in the prompt.
        places: lengths at which checkpoints are kept, ascending; see ``engine.checkpoints``.
        is_resumed: True if it continues here what another worker began.
        activation: position from which its adapters act, and beyond which others cannot share its tokens; 0 but for
            activated LoRA.
        usage: counts so far; those of a choice are added when it ends.
        num_reported: tokens of the prompt that were reported as computed, for ``return_progress``.
        has_source: True once the prefix cache was searched for its prompt, so that the cached tokens are known.
        first_token_s: when its first token was sampled; tokens may be forced before its prompt is computed.
        contained: guard of work for it; set by the engine that takes it.
    """

    request: EngineRequest
    prompt: NDArray[np.int32]  # (num_prompt_tokens,)
    arrival: int
    received_s: float
    chunks: tuple[PlacedChunk, ...] = ()
    places: tuple[int, ...] = ()
    is_resumed: bool = False
    activation: int = 0
    sequences: list[Sequence] = field(factory=list)
    num_unfinished: int = 0
    usage: UsageCounter = field(default=Factory(lambda self: self.first_usage(), takes_self=True))
    has_source: bool = False
    cache_miss: CacheMiss | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    num_reported: int = 0
    contained: Contained = field(init=False, repr=False)

    def first_usage(self) -> UsageCounter:
        """Return the counts of the prompt."""
        counts = Counter[str]()
        for placed in self.chunks:
            counts[placed.chunk.kind] += placed.chunk.num_tokens
        return UsageCounter(len(self.prompt), image_tokens=counts["image"], audio_tokens=counts["audio"])

    @property
    def num_media_bytes(self) -> int:
        """Memory of the data of its chunks, which is kept until the request has ended."""
        return sum(placed.chunk.num_bytes for placed in self.chunks)

    @property
    def cache_namespace(self) -> str:
        """Namespace of its prefix-cache entries: that of the base model if its adapters begin to act later."""
        return cache_key(self.request.namespace, ()) if self.activation else self.request.cache_namespace

    @property
    def num_shareable(self) -> int:
        """Number of its first tokens that other requests of its namespace may share."""
        return self.activation or sys.maxsize

    def is_overdue(self, now: float) -> bool:
        """Return True if the request has waited for its start longer than ``queue_timeout_s``."""
        limit_s = self.request.queue_timeout_s
        return limit_s is not None and self.started_s is None and now - self.received_s >= limit_s

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: by priority, then arrival."""
        return (self.request.priority, self.arrival)


HeldToken = tuple[int, bool, bool]
"""A token that is not part of the text yet: its id, whether it is reasoning, and whether a constraint forced it."""


@define(eq=False)
class Sequence:
    """The token stream of one choice.

    Invariants: ``0 <= num_computed < length + num_pending <= max_length`` while running; ``handle`` is None exactly
    while waiting, and then ``num_computed == num_pending == 0``.

    Attributes:
        on_device: True if the runner samples this sequence's tokens.
        num_pending: tokens sampled on the device that have not been read yet.
        speculation: state of its drafters; None if it is not drafted for.
        drafts: draft tokens that the next step computes after the last token.
        num_surplus: tokens that the runner holds beyond ``num_computed``: unverified drafts.
        num_confirmed: drafts accepted in the last step.
        reads_at_once: True if each token must be read before the next step, because drafts continue from it.
        num_forced: tokens forced by a constraint.
        num_counted: generated tokens already charged to its caller.
        held: tokens at the end that a constraint may still take back; they are not part of the text yet.
        probabilities: of the generated tokens, if a sampler step follows sampled tokens.
        num_reported: number of probabilities in events so far.
        has_asked_disk: True if the disk tier was searched for a prefix of it.
        disk_read: such a prefix that is being loaded into the prefix cache.
        exit_layer: number of layers computed for the last row of logits (None without early exit).
        is_forced: True if its last mask allowed a single token; only for requests with token details.
        adapters: its loaded adapters; empty while waiting.
        embedding: of its next chunk, if that is to be computed now.
        next_checkpoint: length of its next checkpoint; beyond all lengths if the runner keeps none.
    """

    owner: ActiveRequest
    choice: int
    buffer: NDArray[np.int32]  # (max_length,); the first ``length`` are prompt and generated tokens
    length: int
    sampler: SequenceSampler
    text: TextStream
    make_sampler: Callable[[], SequenceSampler]
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
    held: deque[HeldToken] = field(factory=deque)
    probabilities: list[float | None] = field(factory=list)
    num_reported: int = 0
    has_asked_disk: bool = False
    disk_read: StateRead | None = None
    exit_layer: int | None = None
    is_forced: bool = False
    adapters: AdapterSet = ()
    embedding: Embedding | None = None
    next_checkpoint: int = sys.maxsize

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(length,) int32 view of the prompt and the tokens generated so far."""
        return self.buffer[: self.length]

    @property
    def reusable_token_ids(self) -> NDArray[np.int32]:
        """View of the tokens that may be reused of other requests; not the last one, so that there are logits."""
        return self.buffer[: min(self.length - 1, self.owner.num_shareable)]

    @property
    def adapter(self) -> AdapterSet:
        """The adapters of the next tokens to compute."""
        return self.adapters if self.num_computed >= self.owner.activation else ()

    @property
    def text_token_ids(self) -> NDArray[np.int32]:
        """(length,) int32, the same with 0 in place of images: what drafters see."""
        token_ids = self.token_ids
        return np.maximum(token_ids, 0) if self.owner.chunks else token_ids

    @property
    def next_chunk(self) -> PlacedChunk | None:
        """The first chunk of an image that is not computed."""
        chunks = self.owner.chunks
        if not chunks or self.num_computed >= chunks[-1].end:
            return None
        return next(chunk for chunk in chunks if chunk.end > self.num_computed)

    @property
    def is_at_chunk(self) -> bool:
        """True if the next tokens to compute are a chunk of an image."""
        chunk = self.next_chunk
        return chunk is not None and chunk.start == self.num_computed

    @property
    def has_work(self) -> bool:
        """True if a pass over text can compute some of it now."""
        return not self.is_at_chunk if self.num_remaining > 1 else self.num_remaining == 1 and not self.is_drawn

    @property
    def max_length(self) -> int:
        """Number of tokens at which the sequence ends with finish reason ``length``."""
        return len(self.buffer)

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far."""
        return self.length - len(self.owner.prompt)

    @property
    def hidden_token_ids(self) -> tuple[int, ...]:
        """The last tokens of a sequence that has ended, if they never become visible: stop text, or an end token."""
        last = int(self.buffer[self.length - 1])
        is_ended = self.num_generated > 0 and last in self.end_token_ids
        return (*self.text.hidden_token_ids, last) if is_ended else self.text.hidden_token_ids

    def usage(self) -> Usage:
        """Return the counts of its generated tokens."""
        num_reasoning = self.reasoning.num_tokens if self.reasoning is not None else 0
        return Usage(
            completion_tokens=self.num_generated, reasoning_tokens=num_reasoning, forced_tokens=self.num_forced
        )

    @property
    def num_remaining(self) -> int:
        """Number of tokens that the runner has not computed: 1 while decoding, more while prefilling."""
        return self.length + self.num_pending - self.num_computed

    @property
    def is_drawn(self) -> bool:
        """True if its last token is sampled and only has to be read."""
        return self.num_pending > 0 and self.length + self.num_pending == self.max_length

    @property
    def needs_history(self) -> bool:
        """True if sampling a token depends on the tokens before it."""
        follows = self.sampler.penalties is not None or self.constraint is not None or self.reasoning is not None
        return follows or not self.may_end

    @property
    def is_sequential(self) -> bool:
        """True if a token must be read before the next step, because sampling or drafting depends on it."""
        return self.needs_history or self.reads_at_once

    @property
    def ends_by_token(self) -> bool:
        """True if its last token alone says whether it has ended: neither its text nor a constraint ends it."""
        return self.constraint is None and not self.text.may_stop

    @property
    def is_at_end(self) -> bool:
        """True if its last token is an end token, or the last one that it may have."""
        return self.length == self.max_length or int(self.buffer[self.length - 1]) in self.end_token_ids

    @property
    def num_unshown(self) -> int:
        """Number of tokens to be made part of the text now; 1 with a constraint, which holds some back itself."""
        return len(self.held) if self.constraint is None else 1

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are still to be reported; only the first choice reports them."""
        wanted = self.owner.request.num_prompt_logprobs is not None and self.choice == 0
        return wanted and self.num_scored < len(self.owner.prompt) - 1

    @property
    def max_chunk(self) -> int:
        """Maximum number of tokens of a prefill chunk; few if each gives logits.

        A chunk ends before an image, at a checkpoint and where adapters begin to act.
        """
        limit = max(1, self.next_checkpoint - self.num_computed)
        if self.num_computed < self.owner.activation:
            limit = min(limit, self.owner.activation - self.num_computed)
        if (chunk := self.next_chunk) is not None:
            return min(limit, chunk.start - self.num_computed)
        return min(limit, max(1, _MAX_SCORED_LOGITS // self.sampler.vocab_size)) if self.scores_prompt else limit

    @property
    def leader(self) -> Sequence:
        """The choice whose prefill the others share."""
        return self.owner.sequences[0]

    @property
    def is_reasoning(self) -> bool:
        """True if reasoning is not over."""
        return self.reasoning is not None and not self.reasoning.is_over

    @property
    def is_closing(self) -> bool:
        """True if the next token is part of a forced closing of the reasoning."""
        return self.reasoning is not None and bool(self.reasoning.forced_token_ids())

    @property
    def may_end(self) -> bool:
        """True if an end token may be sampled now."""
        if self.constraint is not None and self.is_reasoning:
            return False  # the constraint is still to be met
        return self.num_generated >= self.owner.request.stopping.min_tokens

    def mask(self) -> TokenMask | None:
        """Return the tokens that may be sampled next; None allows every token."""
        mask = self._mask()
        if self.owner.request.token_details:
            self.is_forced = mask is not None and mask.forces(self.sampler.vocab_size)
        return mask

    def _mask(self) -> TokenMask | None:
        if self.reports_logprobs and (forced := self._closing_token_ids()):
            return TokenMask.only(forced[0], self.sampler.vocab_size)
        constraint = None if self.is_reasoning else self.constraint
        banned = frozenset() if self.may_end else self.end_token_ids
        if constraint is None and not banned:
            return None
        return TokenMask(constraint.bitmask() if constraint is not None else None, banned)

    def forced_token_ids(self) -> Iterable[int]:
        """Return tokens to append without sampling, usually none; none with log-probabilities, which need sampling."""
        if self.reports_logprobs:
            return ()
        if self.is_reasoning or self.constraint is None:
            return self._closing_token_ids()
        return self.constraint.forced_token_ids()

    @property
    def reports_logprobs(self) -> bool:
        """True if every generated token is reported with its log-probability."""
        return self.owner.request.sampling.num_logprobs is not None

    def details(self, token_id: int) -> TokenDetails | None:
        """Return the origin of a sampled token, before it is appended; None if the request does not ask for it."""
        if not self.owner.request.token_details:
            return None
        is_drafted = self.num_surplus > 0 and self.drafts[-self.num_surplus] == token_id
        drafter = self.drafter if is_drafted else None
        return TokenDetails(self.is_forced, drafter, self.exit_layer, self.owner.is_resumed)

    @property
    def drafter(self) -> str:
        """Name of the drafter of the drafts."""
        drafter = self.speculation.drafter if self.speculation is not None else None
        assert drafter is not None
        return drafter

    def _closing_token_ids(self) -> tuple[int, ...]:
        return self.reasoning.forced_token_ids() if self.reasoning is not None else ()

    def append(self, token_id: int, *, is_forced: bool = False) -> bool:
        """Append a token and update the dependent state; returns False if tokens were taken back instead.

        Args:
            is_forced: it is one of :meth:`forced_token_ids`.

        Raises:
            GenerationFailed: a plugin's step failed, or the constraint cannot be followed any further.
        """
        reasoning, constraint = self.reasoning, self.constraint
        is_inside = is_closing = False
        if reasoning is not None and not reasoning.is_over:
            is_inside, is_closing, constraint = reasoning.is_inside, self.is_closing, None
        is_end = token_id in self.end_token_ids
        self.buffer[self.length] = token_id
        self.length += 1
        self.num_forced += is_forced
        self.sampler.accept(token_id)
        if self.sampler.is_stateful:
            self.probabilities.append(self.sampler.last_probability)
        self.held.append((token_id, is_inside, is_forced))
        if constraint is not None and (constraint.may_backtrack or not is_end):
            constraint.accept(token_id)
            if constraint.may_backtrack and (num_wrong := constraint.backtrack(len(self.held))):
                self._take_back(num_wrong)
                return False
        if reasoning is not None and not reasoning.is_over and not is_end:
            reasoning.accept(token_id, is_closing)
        return True

    def show(self) -> TextPiece | None:
        """Return the text of the next token, or all that a constraint no longer holds; None if the token is the end."""
        if self.held[-1][0] in self.end_token_ids and self.num_unshown == 1:
            return None
        constraint = self.constraint
        if constraint is None or not constraint.may_backtrack or self.is_reasoning:
            token_id, is_reasoning, _ = self.held.popleft()
            return self.text.push(token_id, is_reasoning=is_reasoning)
        return self._push(max(0, len(self.held) - constraint.num_held()))

    def settle(self) -> None:
        """Make all tokens part of the text: they were reported before, so they are final."""
        self._push(len(self.held))

    def flush(self) -> TextPiece:
        """Return all text that is left, at the end of the sequence."""
        is_ended = bool(self.held) and self.held[-1][0] in self.end_token_ids
        shown = self._push(len(self.held) - is_ended)
        if shown.stop is not None:
            return shown
        self.held.clear()
        rest = self.text.flush()
        return TextPiece(shown.text + rest.text, shown.token_ids + rest.token_ids, rest.stop)

    def _push(self, num_tokens: int) -> TextPiece:
        """Make held tokens part of the text. After a stop string, the rest was not generated."""
        shown = TextPiece("")
        for number in range(num_tokens):
            token_id, is_reasoning, _ = self.held.popleft()
            piece = self.text.push(token_id, is_reasoning=is_reasoning)
            shown = (
                TextPiece(shown.text + piece.text, shown.token_ids + piece.token_ids, piece.stop) if number else piece
            )
            if piece.stop is not None:
                self._drop(len(self.held))
                break
        return shown

    def _take_back(self, num_tokens: int) -> None:
        """Remove held tokens: those that follow are drawn as if these had never been."""
        self._drop(num_tokens)
        del self.probabilities[self.num_generated :]
        self.num_counted = min(self.num_counted, self.num_generated)
        if self.reports_logprobs:
            for _ in range(num_tokens):
                self.pending_logprobs.pop()
        if self.sampler.follows_tokens:
            self.sampler = self.make_sampler()
            generated = self.buffer[len(self.owner.prompt) : self.length].tolist()
            for index, token_id in enumerate(generated):
                self.sampler.recall(token_id, self.probabilities[index] if self.probabilities else None)
                self.sampler.accept(token_id)

    def _drop(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.num_forced -= self.held.pop()[2]
        self.length -= num_tokens

    def take_drafts(self, sampled: Tokens[int]) -> int:
        """Append all drafts that were sampled at once, up to one that may end the sequence; return their number.

        What :meth:`append` and :meth:`confirm_drafts` do token by token; none for a sequence of which more than the ids
        of its tokens is noted.

        Args:
            sampled: the token sampled at the place of each draft, and the one after the last.
        """
        if self.needs_history or self.sampler.follows_tokens or self.reports_logprobs:
            return 0
        number, room = 0, self.max_length - self.length - 1
        for draft, token_id in zip(self.drafts[:room], sampled, strict=False):
            if draft != token_id or draft in self.end_token_ids:
                break
            number += 1
        if number:
            token_ids = self.drafts[:number]
            self.buffer[self.length : self.length + number] = token_ids
            self.length += number
            self.held.extend((token_id, False, False) for token_id in token_ids)
            self.num_computed += number
            self.num_surplus -= number
            self.num_confirmed += number
            self.owner.usage.add_drafts(self.drafter, num_accepted=number)
        return number

    def confirm_drafts(self) -> None:
        """Count drafted tokens as computed while they equal the appended tokens."""
        while self.num_surplus and self.num_computed < self.length:
            if self.drafts[len(self.drafts) - self.num_surplus] != self.buffer[self.num_computed]:
                return
            self.num_computed += 1
            self.num_surplus -= 1
            self.num_confirmed += 1
            self.owner.usage.add_drafts(self.drafter, num_accepted=1)
