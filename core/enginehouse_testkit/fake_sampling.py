"""Device sampling for the fake runner, as on a GPU: from a :class:`enginehouse.contract.backend.Draw` alone.

The arithmetic uses core's functions; this tests the path from a request to a token that is read one step later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Draw, Sampled
from enginehouse.engine.sampling.candidates import LogitRow, RawLogprobs, bounded_by_mass, bounded_by_ratio, pick

__all__ = ["FakeDrawn", "draw_token"]


class FakeDrawn:
    """Sampled tokens. ``was_read`` is True once they have been read."""

    def __init__(self, sampled: Sequence[Sampled]) -> None:
        self.sampled = sampled
        self.was_read = False

    def host(self) -> Sequence[Sampled]:
        """Return the tokens in the order of the draws."""
        self.was_read = True
        return self.sampled


def draw_token(row: NDArray[np.float32], draw: Draw) -> Sampled:
    """Sample one token; ``row`` is (vocab_size,) float32, raw."""
    if not np.isfinite(row.max()):
        return Sampled(-1)
    raw = LogitRow(row, float(row.max()))
    token_id = _draw(_changed(row.copy(), draw), draw)
    num_top = draw.sampling.num_logprobs
    if num_top is None or token_id < 0:
        return Sampled(token_id)
    logprobs = RawLogprobs.of(raw, num_top)
    return Sampled(token_id, logprobs.logprob(float(row[token_id])), logprobs.top_ids, logprobs.top_logprobs)


def _changed(row: NDArray[np.float32], draw: Draw) -> NDArray[np.float32]:
    """Return ``row`` after bias, penalties and mask."""
    sampling = draw.sampling
    if draw.bias_ids is not None and draw.bias_values is not None:
        row[draw.bias_ids] += draw.bias_values
    if draw.seen_ids is not None and draw.seen_counts is not None:
        logits, counts = row[draw.seen_ids], draw.seen_counts
        factor = np.float32(sampling.repetition_penalty)
        logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= np.float32(sampling.presence_penalty) * (counts > 0) + np.float32(sampling.frequency_penalty) * counts
        row[draw.seen_ids] = logits
    if draw.bitmask is not None:
        bits = np.unpackbits(draw.bitmask.view(np.uint8), bitorder="little", count=len(row))
        row[bits == 0] = -np.inf
    return row


def _draw(row: NDArray[np.float32], draw: Draw) -> int:
    sampling, highest = draw.sampling, float(row.max())
    if not np.isfinite(highest):
        return -1
    if sampling.temperature == 0:
        return int(row.argmax())
    head = LogitRow(row, highest, sampling.temperature).whole()
    if sampling.top_k:
        head = head[: sampling.top_k]
    if sampling.top_p < 1:
        head = bounded_by_mass(head, sampling.top_p)
    if sampling.min_p:
        head = bounded_by_ratio(head, sampling.min_p)
    return int(head.token_ids[pick(head.weights, draw.number)])
