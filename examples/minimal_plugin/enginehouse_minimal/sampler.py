"""The sampler ``minimal_cutoff``: no token that is less probable than a request allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates

__all__ = ["CutoffFields", "CutoffSampler"]


@frozen
class CutoffFields:
    """The request field; its default means "off"."""

    minimal_cutoff: float = field(
        default=0.0,
        validator=[validators.ge(0.0), validators.lt(1.0)],
        metadata={"description": "Drop tokens that are less probable than this; 0 is off."},
    )


class CutoffSampler:
    """Implements :class:`enginehouse.contract.sampler.SamplerPlugin`."""

    name = "minimal_cutoff"
    api_version = 1
    request_fields = CutoffFields
    order = 45  # after core's min-p

    def create(self, fields: CutoffFields) -> Callable[[Candidates], NDArray[np.bool_]] | None:
        """The step of one sequence."""
        if not fields.minimal_cutoff:
            return None

        def keep(candidates: Candidates) -> NDArray[np.bool_]:
            weights = np.exp(candidates.logits - candidates.logits[0])
            kept: NDArray[np.bool_] = weights >= fields.minimal_cutoff * weights.sum()
            kept[0] = True  # one must survive
            return kept

        return keep
