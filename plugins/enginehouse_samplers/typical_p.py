"""Locally typical sampling: keeps the tokens whose surprise is closest to the model's expected surprise.

Source: Meister, Pimentel, Wiher and Cotterell, "Locally Typical Sampling" (TACL 2023,
https://arxiv.org/abs/2202.00666). Differences between implementations and the choice made here: the smallest
set whose probability *reaches* ``typical_p`` is kept, as in Hugging Face (llama.cpp continues until it is exceeded);
equally typical tokens are taken most probable first; entropy and probabilities are those of the candidates left by
earlier steps (top-k), as in both.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["TypicalFields", "TypicalSampler", "TypicalStep"]


@frozen
class TypicalFields:
    """Request fields of locally typical sampling."""

    typical_p: float = field(
        default=1.0,
        validator=[validators.gt(0.0), validators.le(1.0)],
        metadata={
            "description": "Keep the most typical tokens until their probability reaches this (locally typical "
            "sampling). 1.0 is off."
        },
    )


@frozen
class TypicalStep:
    """Keeps the most typical candidates with a total probability of ``mass``."""

    mass: float

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return (num_candidates,) bool, True where a token survives."""
        shifted = candidates.logits.astype(np.float64) - float(candidates.logits[0])
        logprobs = shifted - np.log(np.exp(shifted).sum())
        probabilities = np.exp(logprobs)
        entropy = -float((probabilities * logprobs).sum())
        most_typical = np.argsort(np.abs(-logprobs - entropy), kind="stable")
        sums = np.cumsum(probabilities[most_typical])
        num_kept = int(np.searchsorted(sums, self.mass * sums[-1])) + 1
        keep = np.zeros(shifted.size, np.bool_)
        keep[most_typical[:num_kept]] = True
        return keep


class TypicalSampler:
    """Locally typical sampling as a sampler plugin."""

    name = "typical_p"
    api_version = 1
    request_fields = TypicalFields
    order = 20
    aliases = ("typ_p", "typical")

    def create(self, fields: TypicalFields) -> TypicalStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return None if fields.typical_p == 1.0 else TypicalStep(fields.typical_p)
