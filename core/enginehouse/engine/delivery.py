"""What leaves the engine for one sequence: text with its tokens and log-probabilities, ends, figures.

Called by the loop; builds events and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from enginehouse.engine.sampling import Sampled
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.output.text_stream import Piece
from enginehouse.types import RequestFinished, TextDelta, TokenLogprob, TopLogprob

__all__ = ["summary", "text_delta", "token_logprob"]


def token_logprob(sampled: Sampled, token_bytes: Tokens[bytes]) -> TokenLogprob:
    """The log-probability entry of a token that was drawn with log-probabilities."""
    assert sampled.logprob is not None
    top: tuple[TopLogprob, ...] = ()
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        pairs = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        top = tuple(TopLogprob(token_id, token_bytes[token_id], logprob) for token_id, logprob in pairs)
    return TokenLogprob(sampled.token_id, token_bytes[sampled.token_id], sampled.logprob, top)


def text_delta(sequence: Sequence, piece: Piece) -> TextDelta | None:
    """The event of a piece of text, with the log-probabilities that wait for its tokens; None when empty."""
    if not piece.token_ids and not piece.text:
        return None
    logprobs = None
    if sequence.owner.request.sampling.num_logprobs is not None:
        logprobs = tuple(sequence.pending_logprobs.popleft() for _ in piece.token_ids)
    return TextDelta(sequence.choice, piece.text, piece.token_ids, logprobs)


def summary(owner: ActiveRequest, now_s: float) -> RequestFinished:
    """The last event of a request."""
    started_s = owner.started_s if owner.started_s is not None else now_s
    first_s = owner.first_token_s if owner.first_token_s is not None else now_s
    return RequestFinished(
        num_prompt_tokens=len(owner.prompt),
        num_cached_tokens=owner.num_cached_tokens or 0,
        num_completion_tokens=owner.num_completion_tokens,
        num_forced_tokens=owner.num_forced_tokens,
        queue_s=started_s - owner.received_s,
        prefill_s=first_s - started_s,
        decode_s=now_s - first_s,
    )
