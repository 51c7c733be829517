"""Top-n-sigma: keeps the tokens whose logit is within n standard deviations of the largest one.

Source: Tang et al., "Top-n sigma: Not All Logits Are You Need" (https://arxiv.org/abs/2411.07641), with the
details of llama.cpp: the standard deviation is that of the population, over all tokens that are not banned.
As in the paper it is computed from the logits before temperature, so the set does not depend on temperature; the
logits are those after bias and penalties.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["TopNSigmaFields", "TopNSigmaSampler", "TopNSigmaStep"]


@frozen
class TopNSigmaFields:
    """Request fields of top-n-sigma."""

    top_n_sigma: float = field(
        default=0.0,
        validator=validators.ge(-1.0),
        metadata={
            "description": "Keep tokens whose logit is at most this many standard deviations of all logits below "
            "the largest one. 0 and negative values are off."
        },
    )


@frozen
class TopNSigmaStep:
    """Keeps candidates within ``num_sigmas`` standard deviations of the largest logit."""

    num_sigmas: float

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return (num_candidates,) bool, True where a token survives; the most probable candidate always does."""
        row = candidates.row
        maximum = row.max()
        possible = row if row.min() > -np.inf else row[row > -np.inf]
        threshold = float(maximum) - self.num_sigmas * float(possible.std(dtype=np.float64))
        keep: NDArray[np.bool_] = row[candidates.token_ids].astype(np.float64) >= threshold
        keep[0] = True  # even if an earlier step (XTC) has removed everything near the maximum
        return keep


class TopNSigmaSampler:
    """Top-n-sigma as a sampler plugin."""

    name = "top_n_sigma"
    api_version = 1
    request_fields = TopNSigmaFields
    order = 60

    def create(self, fields: TopNSigmaFields) -> TopNSigmaStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return TopNSigmaStep(fields.top_n_sigma) if fields.top_n_sigma > 0 else None
