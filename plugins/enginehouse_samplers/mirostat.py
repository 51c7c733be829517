"""Mirostat 2: adaptive truncation that keeps the surprise of the text near a target.

Source: Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
(https://arxiv.org/abs/2007.14966), in the version without a Zipf estimate, as in llama.cpp: tokens with a surprise
above mu are cut, and after each draw mu moves by ``eta`` times the difference between the drawn token's surprise, among
the remaining tokens, and ``tau``; mu starts at twice ``tau``. Mode 1, which estimates Zipf's exponent, is not offered:
the paper's own authors found no gain, and its estimate depends on the size of the vocabulary.

Tokens forced by a constraint were not drawn, so they do not change mu.
"""

from __future__ import annotations

from math import log, log2
from typing import Any

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["MirostatFields", "MirostatSampler", "MirostatStep"]


def _check_mode(_: Any, attribute: Any, value: int) -> None:
    if value not in (0, 2):
        also = "; version 1 is not offered" if value == 1 else ""
        raise ValueError(f"'{attribute.name}' must be 0 (off) or 2, not {value}{also}")


@frozen
class MirostatFields:
    """Request fields of Mirostat."""

    mirostat: int = field(
        default=0,
        validator=_check_mode,
        metadata={
            "description": "2 turns Mirostat 2 on, which replaces the other truncations (top_k, top_p, ...). 0 is off.",
            "choices": (0, 2),
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


class MirostatSampler:
    """Mirostat as a sampler plugin. Its step replaces all other truncations."""

    name = "mirostat"
    api_version = 1
    request_fields = MirostatFields
    order = 70
    role = "replacement"

    def create(self, fields: MirostatFields) -> MirostatStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return MirostatStep(fields.mirostat_tau, fields.mirostat_eta) if fields.mirostat else None
