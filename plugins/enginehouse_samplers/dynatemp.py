"""Dynamic temperature: low if the model is confident about the next token, high if it is not.

Source: koboldcpp's and llama.cpp's "entropy based dynamic temperature". The temperature ranges from ``temperature -
dynatemp_range`` (at least 0) to ``temperature + dynatemp_range``, by the entropy of the candidates relative to its
maximum, to the power of ``dynatemp_exponent``. It takes the place of the temperature step: by default before
truncation, so the entropy is that of all tokens; llama.cpp's default order has it after truncation, and a request that
lists ``temperature`` last in ``samplers`` gets that.
"""

from __future__ import annotations

from math import log

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

__all__ = ["DynatempFields", "DynatempSampler", "DynatempStep"]


@frozen
class DynatempFields:
    """Request fields of dynamic temperature."""

    dynatemp_range: float = field(
        default=0.0,
        validator=[validators.ge(0.0), validators.le(2.0)],
        metadata={
            "description": "How far the temperature may move with the model's uncertainty, up and down. 0 is off."
        },
    )
    dynatemp_exponent: float = field(
        default=1.0,
        validator=[validators.ge(0.0), validators.le(10.0)],
        metadata={"description": "Exponent of the relative entropy that dynamic temperature follows."},
    )


@frozen
class DynatempStep:
    """Sets the temperature by entropy, within ``span`` of the request's."""

    span: float
    exponent: float

    def temperature(self, logits: NDArray[np.float32], temperature: float) -> float:
        """See :class:`enginehouse.contract.sampler.TemperatureStep`."""
        if logits.size < 2:
            return temperature
        shifted = logits - logits.max()
        weights = np.exp(shifted)
        total = float(weights.sum(dtype=np.float64))
        # The entropy of weights w = exp(x) is log(sum(w)) - sum(w x) / sum(w).
        entropy = log(total) - float(np.multiply(weights, shifted).sum(dtype=np.float64)) / total
        share = min(max(entropy / log(logits.size), 0.0), 1.0)
        low, high = max(0.0, temperature - self.span), temperature + self.span
        return float(low + (high - low) * share**self.exponent)


class DynatempSampler:
    """Dynamic temperature as a sampler plugin. Its step replaces core's temperature."""

    name = "dynatemp"
    api_version = 1
    request_fields = DynatempFields
    order = 0
    role = "temperature"

    def create(self, fields: DynatempFields) -> DynatempStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        return DynatempStep(fields.dynatemp_range, fields.dynatemp_exponent) if fields.dynatemp_range else None
