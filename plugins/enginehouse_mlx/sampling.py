"""Samples tokens with MLX on the device of the logits: core's sampling specification over a batch of rows.

Called by the runner once per step, right after the forward pass. Nothing is computed before :meth:`MlxDrawn.host` is
called or MLX is told to start, so the next pass can be built meanwhile. Rows without changes are sampled directly from
the model's logits, and rows at temperature 0 are not sorted.

Source: ``sampler`` is the specification. Core adds in float64, which Metal does not support; sums here are float32,
added block by block, so a draw within about 1e-5 of a boundary may select the neighbouring token.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import (
    DRAW_FIELDS,
    HIGHEST_TEMPERATURE,
    LOWEST_LOGPROB,
    LOWEST_TEMPERATURE,
    Draw,
    Sampled,
)

__all__ = ["SUPPORTED", "MlxDrawn", "draw_rows", "sample"]

SUPPORTED = DRAW_FIELDS
"""Fields of SamplingParams, and masks, that :func:`sample` supports."""

_BLOCK = 512


class MlxDrawn:
    """Sampled tokens, computed asynchronously.

    Args:
        tokens: (num_draws,) int32.
        logprobs: None, or the log-probability of each drawn token (num_draws,), and the ids and log-probabilities of
            the best tokens, (num_draws, num_top) each.
        num_tops: number of best tokens that each draw reports; None reports no log-probabilities.
    """

    def __init__(
        self,
        tokens: mx.array,
        logprobs: tuple[mx.array, mx.array, mx.array] | None,
        num_tops: Sequence[int | None],
    ) -> None:
        self.arrays = [tokens, *(logprobs or ())]
        self._num_tops = num_tops

    def host(self) -> Sequence[Sampled]:
        """Wait for the results; returns one token per draw."""
        tokens: list[int] = self.arrays[0].tolist()  # type: ignore[assignment]
        if len(self.arrays) == 1:
            return [Sampled(token) for token in tokens]
        logprobs, top_ids, top_logprobs = (np.asarray(array) for array in self.arrays[1:])
        return [
            Sampled(token)
            if num_top is None
            else Sampled(
                token,
                float(logprobs[i]),
                top_ids[i, :num_top].astype(np.int64),
                top_logprobs[i, :num_top].astype(np.float64),
            )
            for i, (token, num_top) in enumerate(zip(tokens, self._num_tops, strict=True))
        ]


def sample(logits: mx.array, draws: Sequence[Draw]) -> MlxDrawn:
    """Draw one token for each of ``draws`` from (num_rows, vocab_size) float32 logits, which are not changed."""
    raw = logits[mx.array([draw.row for draw in draws])]
    tokens = draw_rows(_changed(raw, draws), draws)
    num_tops = [draw.sampling.num_logprobs for draw in draws]
    logprobs = None if all(num is None for num in num_tops) else _logprobs(raw, tokens, max(n or 0 for n in num_tops))
    return MlxDrawn(tokens, logprobs, num_tops)


def draw_rows(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Draw one token from each row.

    Args:
        logits: (num_draws, vocab_size) float32; -inf for tokens that are not allowed.
        draws: temperature, truncations and random number of each row.

    Returns:
        (num_draws,) int32 token ids; -1 where a row contains NaN or +inf, or only -inf.
    """
    highest = logits.max(axis=1)
    is_fit = mx.isfinite(highest) & ~mx.isnan(logits).any(axis=1)
    tokens = mx.argmax(logits, axis=1).astype(mx.int32)
    weighted = [i for i, draw in enumerate(draws) if draw.sampling.temperature]
    if len(weighted) == len(draws):
        tokens = _draw_weighted(logits, highest, draws)
    elif weighted:
        some = mx.array(weighted)
        tokens[some] = _draw_weighted(logits[some], highest[some], [draws[i] for i in weighted])
    return mx.where(is_fit, tokens, -1)


def _draw_weighted(logits: mx.array, highest: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Truncate, each step on the result of the previous one, and draw; (num_draws,) int32."""
    width = logits.shape[1]
    sampling = [draw.sampling for draw in draws]
    temperatures = [min(max(s.temperature, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE) for s in sampling]
    top_k = [s.top_k or width for s in sampling]
    order = _ranked(logits, min(max(top_k), width))
    values = mx.take_along_axis(logits, order, axis=1)
    weights = mx.exp((values - highest[:, None]) / mx.array(temperatures, mx.float32)[:, None])
    if min(top_k) < order.shape[1]:
        weights = mx.where(mx.arange(order.shape[1]) < mx.array(top_k)[:, None], weights, 0.0)
    sums = _running_sums(weights)
    if any(s.top_p < 1.0 for s in sampling):
        top_p = mx.array([s.top_p for s in sampling], mx.float32)[:, None]
        weights = mx.where((sums - weights < top_p * sums[:, -1:]) | (top_p >= 1.0), weights, 0.0)
        weights[:, 0] = 1.0  # the first one always stays
        sums = _running_sums(weights)
    if any(s.min_p > 0.0 for s in sampling):
        weights = mx.where(weights >= mx.array([s.min_p for s in sampling], mx.float32)[:, None], weights, 0.0)
        sums = _running_sums(weights)
    wanted = mx.array([draw.number for draw in draws], mx.float32)[:, None] * sums[:, -1:]
    passed = (sums <= wanted).sum(axis=1)
    last = (weights > 0.0).sum(axis=1) - 1  # the kept tokens are a prefix, so this is its end
    place = mx.minimum(passed, mx.maximum(last, 0))
    return mx.take_along_axis(order, place[:, None], axis=1)[:, 0].astype(mx.int32)


def _ranked(logits: mx.array, count: int) -> mx.array:
    """(num_rows, count) ids of the most probable tokens: by logit descending, then by id.

    Both are packed into one integer: the bits of a float32, inverted for a negative one, sort like its value. Adding
    0.0 makes -0.0 and 0.0 equal.
    """
    bits = mx.view(logits + 0.0, mx.int32)
    bits = ~mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (bits.astype(mx.int64) << 32) | mx.arange(logits.shape[1], dtype=mx.int64)
    if count < logits.shape[1]:
        keys = mx.partition(keys, count - 1, axis=1)[:, :count]
    return mx.sort(keys, axis=1) & 0xFFFFFFFF


def _running_sums(weights: mx.array) -> mx.array:
    """Equivalent of ``mx.cumsum(weights, axis=1)`` with the rounding error of some hundred additions instead of all."""
    num_rows, width = weights.shape
    padded = mx.pad(weights, [(0, 0), (0, -width % _BLOCK)]).reshape(num_rows, -1, _BLOCK)
    inside = mx.cumsum(padded, axis=2)
    before = mx.cumsum(inside[:, :, -1], axis=1, inclusive=False)
    return (inside + before[:, :, None]).reshape(num_rows, -1)[:, :width]


def _changed(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """(num_draws, vocab_size) logits after bias, penalties and masks; the input itself if there are none."""
    rows = mx.array(logits)  # a new handle: the assignments below must not change the raw logits
    for i, draw in enumerate(draws):
        if draw.bias_ids is not None and len(draw.bias_ids):
            rows[i, mx.array(draw.bias_ids)] += mx.array(draw.bias_values)
        if draw.seen_ids is not None and len(draw.seen_ids):
            seen = mx.array(draw.seen_ids)
            rows[i, seen] = _penalised(rows[i, seen], draw)
    if any(draw.bitmask is not None for draw in draws):
        allowed = mx.array(np.stack([_bits(draw.bitmask, logits.shape[1]) for draw in draws]))
        rows = mx.where(allowed, rows, -mx.inf)
    return rows


def _penalised(logits: mx.array, draw: Draw) -> mx.array:
    """Penalise the logits of seen tokens: first the repetition penalty, then presence and frequency."""
    sampling, counts = draw.sampling, draw.seen_counts
    assert counts is not None
    loss = np.float32(sampling.presence_penalty) * (counts > 0) + np.float32(sampling.frequency_penalty) * counts
    factor = sampling.repetition_penalty
    return mx.where(logits > 0, logits / factor, logits * factor) - mx.array(loss.astype(np.float32))


def _bits(bitmask: NDArray[np.int32] | None, width: int) -> NDArray[np.bool_]:
    """(vocab_size,) bool, True for tokens that a mask allows."""
    if bitmask is None:
        return np.ones(width, np.bool_)
    return np.unpackbits(bitmask.view(np.uint8), bitorder="little", count=width).astype(np.bool_)


def _logprobs(raw: mx.array, tokens: mx.array, num_top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Raw log-probabilities of the drawn tokens, and the best tokens of each row with their log-probabilities."""
    normalisers = mx.logsumexp(raw, axis=1, keepdims=True)
    chosen = mx.take_along_axis(raw, mx.maximum(tokens, 0)[:, None], axis=1) - normalisers
    ids = _ranked(raw, max(num_top, 1))[:, :num_top]
    best = mx.minimum(mx.take_along_axis(raw, ids, axis=1) - normalisers, 0.0)
    return mx.clip(chosen[:, 0], LOWEST_LOGPROB, 0.0), ids, best
