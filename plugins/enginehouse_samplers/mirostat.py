"""Mirostat: adaptive truncation that keeps the surprise of the text near a target, in its two versions.

Source: Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
(https://arxiv.org/abs/2007.14966), as in llama.cpp (``llama_sampler_mirostat`` and ``llama_sampler_mirostat_v2``).
After each draw ``mu`` moves by ``eta`` times the difference between the drawn token's surprise, among the remaining
tokens, and ``tau``; it starts at twice ``tau``. Version 1 estimates Zipf's exponent from the 100 most probable tokens
and keeps the number of tokens that it gives for ``mu``; version 2 cuts tokens with a surprise above ``mu``. Where
llama.cpp's estimate overflows or divides by zero (one candidate, equal logits), the limit of the formula is used.

Tokens forced by a constraint were not drawn, so they do not change mu.
"""

from __future__ import annotations

from math import exp, expm1, inf, log, log2
from typing import Any

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["MirostatFields", "MirostatSampler", "MirostatStep", "ZipfMirostatStep"]

_NUM_RANKS = 100
"""Most probable tokens from which Zipf's exponent is estimated."""
_MAX_EXPONENT = 700.0
"""Of a power of e that a float holds."""


def _check_mode(_: Any, attribute: Any, value: int) -> None:
    if value not in (0, 1, 2):
        raise ValueError(f"'{attribute.name}' must be 0 (off), 1 or 2, not {value}")


@frozen
class MirostatFields:
    """Request fields of Mirostat."""

    mirostat: int = field(
        default=0,
        validator=_check_mode,
        metadata={
            "description": "1 and 2 are the versions of Mirostat, which replaces the other truncations (top_k, top_p, "
            "...). 0 is off.",
            "choices": (0, 1, 2),
        },
    )
    mirostat_tau: float = field(
        default=5.0,
        validator=[validators.ge(0.0), validators.le(100.0)],
        metadata={"description": "Surprise that Mirostat aims at, in bits per token."},
    )
    mirostat_eta: float = field(
        default=0.1,
        validator=[validators.ge(0.0), validators.le(1.0)],
        metadata={"description": "How fast Mirostat corrects itself."},
    )


class MirostatStep:
    """Cuts candidates with a surprise above ``mu`` bits.

    Args:
        tau: target, in bits.
        eta: share of the last error by which ``mu`` is corrected.

    Attributes:
        mu: maximum surprise of the next token, in bits.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau, self._eta = tau, eta
        self.mu = 2 * tau

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return (num_candidates,) bool, True where a token survives; the most probable candidate always does."""
        shifted = candidates.logits.astype(np.float64) - float(candidates.logits[0])
        surprises = (log(float(np.exp(shifted).sum())) - shifted) / log(2)
        keep: NDArray[np.bool_] = surprises <= self.mu
        keep[0] = True
        return keep

    def accept(self, token_id: int, probability: float | None) -> None:
        """See :class:`enginehouse.contract.sampler.FollowingStep`."""
        if probability:
            self.mu -= self._eta * (-log2(probability) - self._tau)


class ZipfMirostatStep(MirostatStep):
    """Keeps the number of candidates that Zipf's law gives for a surprise of ``mu`` bits."""

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """See :class:`MirostatStep`."""
        keep = np.zeros(candidates.logits.size, np.bool_)
        keep[: _num_kept(candidates.logits[:_NUM_RANKS], self.mu, candidates.row.size, keep.size)] = True
        return keep


def _num_kept(logits: NDArray[np.float32], mu: float, vocab_size: int, num_candidates: int) -> int:
    """Return the number of most probable tokens to keep.

    Args:
        logits: (num_ranks,) float32, those of the most probable tokens, descending.
        mu: maximum surprise in bits.
    """
    if logits.size < 2:
        return 1
    ranks = np.arange(1, logits.size + 1, dtype=np.float64)
    ratios, falls = np.diff(np.log(ranks)), -np.diff(logits.astype(np.float64))
    exponent = float((ratios * falls).sum() / (ratios * ratios).sum())
    epsilon = exponent - 1
    # epsilon / (1 - N ** -epsilon), whose limit at 0 is 1 / ln N
    log_vocab = log(vocab_size)
    share = -epsilon * log_vocab
    scale = 1 / log_vocab if epsilon == 0 else (epsilon / -expm1(share) if share < _MAX_EXPONENT else 0.0)
    log_scaled = (log(scale) if scale > 0 else -inf) + mu * log(2)
    if exponent == 0:
        return num_candidates if log_scaled > 0 else 1
    log_kept = log_scaled / exponent
    return num_candidates if log_kept >= log(num_candidates) else max(int(exp(log_kept)), 1)


class MirostatSampler:
    """Mirostat as a sampler plugin. Its step replaces all other truncations."""

    name = "mirostat"
    api_version = 1
    request_fields = MirostatFields
    order = 70
    role = "replacement"

    def create(self, fields: MirostatFields) -> MirostatStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        if not fields.mirostat:
            return None
        step = ZipfMirostatStep if fields.mirostat == 1 else MirostatStep
        return step(fields.mirostat_tau, fields.mirostat_eta)
