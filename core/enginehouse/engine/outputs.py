"""Reports of the loop: events of sequences with tokens and log-probabilities, request summaries, and snapshots.

Snapshots and statistics are taken between steps. Decides and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from itertools import islice

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from enginehouse.contract.backend import Sampled
from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.inspection import (
    BATCH_SIZES,
    EngineMetrics,
    EngineView,
    Phase,
    RequestView,
    SequenceView,
    batch_size_bucket,
)
from enginehouse.contract.types import (
    EngineStats,
    HeldTokens,
    PromptLogprobs,
    PromptProgress,
    RequestFinished,
    TextDelta,
    TokenDetails,
    TokenLogprob,
    TopLogprob,
)
from enginehouse.contract.usage import Usage
from enginehouse.engine.sampling.candidates import LogitRow, RawLogprobs
from enginehouse.engine.scheduler import Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.engine.text.text_stream import TextPiece


def token_logprob(sampled: Sampled, token_bytes: Tokens[bytes], details: TokenDetails | None = None) -> TokenLogprob:
    """Return the log-probability entry of a token that was sampled with log-probabilities."""
    assert sampled.logprob is not None
    top: tuple[TopLogprob, ...] = ()
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        pairs = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        top = tuple(TopLogprob(token_id, token_bytes[token_id], logprob) for token_id, logprob in pairs)
    return TokenLogprob(sampled.token_id, token_bytes[sampled.token_id], sampled.logprob, top, details)


def score_tokens(
    rows: NDArray[np.float32], token_ids: NDArray[np.int32], num_top: int, token_bytes: Tokens[bytes]
) -> PromptLogprobs:
    """Return log-probability and rank of each given token; of equal logits, the lower id ranks first.

    Args:
        rows: (num_tokens, vocab_size) float32, the raw logits that predict each token.
        token_ids: (num_tokens,) int32.
        num_top: alternatives per token.
        token_bytes: bytes of each id.

    Raises:
        GenerationFailed: a row contains NaN or infinity.
    """
    entries, ranks = [], []
    for row, token_id in zip(rows, token_ids.tolist(), strict=True):
        maximum = float(row.max())
        if not math.isfinite(maximum):
            raise GenerationFailed(f"the model returned {maximum} among its logits")
        raw = RawLogprobs.of(LogitRow(row, maximum), num_top)
        sampled = Sampled(token_id, raw.logprob(float(row[token_id])), raw.top_ids, raw.top_logprobs)
        entries.append(token_logprob(sampled, token_bytes))
        logit = row[token_id]
        ranks.append(1 + int(np.count_nonzero(row > logit)) + int(np.count_nonzero(row[:token_id] == logit)))
    return PromptLogprobs(tuple(entries), tuple(ranks))


def score_prompt(sequence: Sequence, rows: NDArray[np.float32], token_bytes: Tokens[bytes]) -> PromptLogprobs | None:
    """Score the prompt tokens that follow the computed ones; None if all of them were scored before.

    Args:
        rows: (num_rows, vocab_size) float32, the raw logits of the last tokens that were computed.
    """
    start = sequence.num_computed - len(rows)
    end = min(sequence.num_computed, len(sequence.owner.prompt) - 1)
    if end <= sequence.num_scored:
        return None  # recomputed after a preemption
    scored = score_tokens(
        rows[sequence.num_scored - start : end - start],
        sequence.owner.prompt[sequence.num_scored + 1 : end + 1],
        sequence.owner.request.num_prompt_logprobs or 0,
        token_bytes,
    )
    sequence.num_scored = end
    return scored


def prompt_progress(sequence: Sequence, now_s: float) -> PromptProgress | None:
    """Return how much of its prompt is computed, after each step of its prefill; None if the request did not ask."""
    owner = sequence.owner
    if not owner.request.return_progress or owner.num_reported >= len(owner.prompt) or owner.started_s is None:
        return None
    owner.num_reported = min(sequence.num_computed, len(owner.prompt))
    seconds = now_s - owner.started_s
    return PromptProgress(len(owner.prompt), owner.num_reported, owner.usage.cached_tokens, seconds)


def text_delta(sequence: Sequence, piece: TextPiece) -> TextDelta | None:
    """Return the event of a piece of text with the pending log-probabilities of its tokens; None if empty."""
    if not piece.token_ids and not piece.text:
        return None
    logprobs = None
    if sequence.owner.request.sampling.num_logprobs is not None:
        logprobs = tuple(sequence.pending_logprobs.popleft() for _ in piece.token_ids)
    work = sequence.owner.usage.work()
    if not sequence.text.num_pending and not sequence.probabilities:
        return TextDelta(sequence.choice, piece.text, piece.token_ids, logprobs, work=work)
    held_ids = sequence.text.pending_token_ids
    held = HeldTokens(held_ids, tuple(islice(sequence.pending_logprobs, len(held_ids)))) if held_ids else None
    # Tokens that a constraint may take back are not reported.
    start, end = sequence.num_reported, max(0, len(sequence.probabilities) - len(sequence.held))
    sequence.num_reported = max(start, end)
    probabilities = tuple(sequence.probabilities[start:end])
    return TextDelta(sequence.choice, piece.text, piece.token_ids, logprobs, held, probabilities, work)


def summary(owner: ActiveRequest, now_s: float) -> RequestFinished:
    """Return the last event of a request."""
    started_s = owner.started_s if owner.started_s is not None else now_s
    first_s = owner.first_token_s if owner.first_token_s is not None else now_s
    times = Usage(queue_s=started_s - owner.received_s, prefill_s=first_s - started_s, decode_s=now_s - first_s)
    return RequestFinished(times + owner.usage, owner.cache_miss)


class StepCounts:
    """Number of steps by batch size."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_batched = 0
        self._by_size = [0] * (len(BATCH_SIZES) + 1)

    def add(self, num_sequences: int) -> None:
        """Count one step."""
        self.num_steps += 1
        self._num_batched += num_sequences
        self._by_size[batch_size_bucket(num_sequences)] += 1

    def metrics(self, stats: EngineStats, num_cache_tokens: int) -> EngineMetrics:
        """Return the statistics, combined with ``stats``."""
        return EngineMetrics(stats, num_cache_tokens, tuple(self._by_size), self._num_batched)


def view_engine(scheduler: Scheduler, requests: Iterable[ActiveRequest], now_s: float) -> EngineView:
    """Return a snapshot of running and waiting requests and of the prefix cache."""
    runner = scheduler.runner
    return EngineView(
        num_slots=scheduler.slots,
        num_cache_tokens=runner.capabilities.cache_tokens,
        num_free_tokens=runner.free_tokens(),
        requests=tuple(_view_request(request, scheduler, now_s) for request in requests),
        prefixes=tuple(scheduler.cache.entries()),
    )


def _view_request(owner: ActiveRequest, scheduler: Scheduler, now_s: float) -> RequestView:
    return RequestView(
        request_id=owner.request.request_id,
        age_s=now_s - owner.received_s,
        usage=replace(owner.usage.snapshot(), completion_tokens=sum(one.num_generated for one in owner.sequences)),
        sequences=tuple(
            SequenceView(
                choice=sequence.choice,
                phase=phase_of(sequence),
                num_kv_tokens=sequence.num_computed,
                num_completion_tokens=sequence.num_generated,
                is_thinking=sequence.reasoning is not None and sequence.reasoning.is_inside,
            )
            for sequence in owner.sequences
            if scheduler.holds(sequence)
        ),
    )


def phase_of(sequence: Sequence) -> Phase:
    """Return the phase of a sequence that has not ended."""
    if sequence.handle is None:
        return "paused" if sequence.num_generated else "queued"
    is_prefilled = sequence.num_computed >= len(sequence.owner.prompt)
    return "decode" if is_prefilled and sequence.num_generated else "prefill"
