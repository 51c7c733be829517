"""Adaptive-p: weights tokens by how close their probability is to a target that follows the text.

The target is corrected by the mean probability of the tokens drawn so far, older ones counting less: a text of probable
tokens makes the next one less probable, and the reverse. Truncations come before; min-p is usual.

Source: llama.cpp's ``llama_sampler_adaptive_p`` (https://github.com/ggml-org/llama.cpp/pull/17927), with its constants.
Tokens that were not drawn, such as those forced by a constraint, do not change the mean.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["AdaptivePFields", "AdaptivePSampler", "AdaptivePStep"]

_WIDTH = 0.3
"""Distance from the target at which the weight falls no longer quadratically but linearly, in logits."""
_SHARPNESS = 10.0


@frozen
class AdaptivePFields:
    """Request fields of adaptive-p."""

    adaptive_target: float = field(
        default=-1.0,
        validator=[validators.ge(-1.0), validators.le(1.0)],
        metadata={"description": "Probability that drawn tokens should have on average. Below 0 is off."},
    )
    adaptive_decay: float = field(
        default=0.9,
        validator=[validators.ge(0.0), validators.le(0.99)],
        metadata={"description": "Weight of a token in the mean, relative to the token after it."},
    )


class AdaptivePStep:
    """Weights of one sequence.

    Args:
        target: in [0, 1].
        decay: in [0, 0.99].
    """

    def __init__(self, target: float, decay: float) -> None:
        self._target, self._decay = target, decay
        self._sum = target / (1 - decay)
        self._num = 1 / (1 - decay)

    @property
    def adapted_target(self) -> float:
        """Target of the next token."""
        return min(max(2 * self._target - self._sum / self._num, 0.0), 1.0)

    def weights(self, candidates: Candidates) -> NDArray[np.float64]:
        """Return (num_candidates,) float64, the unnormalised probabilities of the draw."""
        powers = np.exp(candidates.logits.astype(np.float64) - float(candidates.logits[0]))
        distances = np.abs(powers / powers.sum() - self.adapted_target) / _WIDTH
        logits = -_SHARPNESS * distances**2 / (1 + distances)
        found: NDArray[np.float64] = np.exp(logits - logits.max())
        return found

    def accept(self, token_id: int, probability: float | None) -> None:
        """See :class:`enginehouse.contract.sampler.FollowingStep`; the probability is that before the weights."""
        if probability is not None:
            self._sum = probability + self._decay * self._sum
            self._num = 1 + self._decay * self._num


class AdaptivePSampler:
    """Adaptive-p as a sampler plugin."""

    name = "adaptive_p"
    api_version = 1
    request_fields = AdaptivePFields
    order = 80
    role = "weights"

    def create(self, fields: AdaptivePFields) -> AdaptivePStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return None if fields.adaptive_target < 0 else AdaptivePStep(fields.adaptive_target, fields.adaptive_decay)
