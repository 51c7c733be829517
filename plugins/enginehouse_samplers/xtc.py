"""XTC, "exclude top choices": occasionally removes all likely tokens but the least likely of them.

Source: p-e-w's pull request 6335 to text-generation-webui (2024), which defined it, and llama.cpp's
version: with ``xtc_probability``, if at least two candidates reach ``xtc_threshold``, all of these but the
last are removed. A threshold above 0.5 could never have an effect, so it is refused instead of ignored. Here the
step runs after temperature (llama.cpp's default order has temperature last), and the random decision at a position is
a function of seed, choice and position, so an answer can be reproduced.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["XtcFields", "XtcSampler", "XtcStep"]


@frozen
class XtcFields:
    """Request fields of XTC."""

    xtc_probability: float = field(
        default=0.0,
        validator=[validators.ge(0.0), validators.le(1.0)],
        metadata={"description": "Chance, per token, that the likeliest choices are excluded (XTC). 0 is off."},
    )
    xtc_threshold: float = field(
        default=0.1,
        validator=[validators.ge(0.0), validators.le(0.5)],
        metadata={"description": "Probability from which a token counts as one of the likeliest choices (XTC)."},
    )


@frozen
class XtcStep:
    """Removes all candidates of at least ``threshold`` but the last, with probability ``probability``."""

    probability: float
    threshold: float

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return (num_candidates,) bool, True where a token survives."""
        keep = np.ones(candidates.token_ids.size, np.bool_)
        if candidates.uniform("act") < self.probability:
            weights = np.exp(candidates.logits.astype(np.float64) - float(candidates.logits[0]))
            num_likely = int((weights >= self.threshold * weights.sum()).sum())
            keep[: max(num_likely - 1, 0)] = False
        return keep


class XtcSampler:
    """XTC as a sampler plugin."""

    name = "xtc"
    api_version = 1
    request_fields = XtcFields
    order = 50

    def create(self, fields: XtcFields) -> XtcStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return XtcStep(fields.xtc_probability, fields.xtc_threshold) if fields.xtc_probability > 0 else None
