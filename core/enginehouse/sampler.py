"""The contract of sampler plugins: truncation steps with request fields of their own.

Core draws a token in this order: logit bias, penalties, mask, temperature, then truncation steps in
``order``, then the draw. Core's own steps are top-k (order 10), top-p (30) and min-p (40); a plugin's
step takes any other place, for example typical-p 20, XTC 50, top-n-sigma 60. A step sees candidates
only and says which survive, so it works on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = ["Candidates", "SamplerPlugin", "TruncationStep"]


@frozen(eq=False)
class Candidates:
    """The tokens still in play at one position.

    Attributes:
        token_ids: (num_candidates,) int32.
        logits: (num_candidates,) float32 after temperature, descending; ties by ascending id.
        row: (vocab_size,) float32, the whole row after bias, penalties and mask, before temperature.
            Not to be changed.
        temperature: what ``logits`` was divided by.
        uniform: ``uniform(purpose)`` is a number in [0, 1) that depends only on the request's seed, the
            choice, the position and ``purpose`` (a short string), so that answers can be replayed.
    """

    token_ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    row: NDArray[np.float32]
    temperature: float
    uniform: Callable[[str], float]


class TruncationStep(Protocol):
    """One request's truncation; called once per position."""

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """(num_candidates,) bool, True where a token survives; at least one must."""
        ...


@runtime_checkable
class SamplerPlugin(Protocol):
    """What ``register_samplers`` hands over.

    Attributes:
        name: unique; also the key of this sampler's fields in ``SamplingParams.extensions``.
        request_fields: attrs class; each attribute is a top-level request field whose default means "off".
            Ranges are attrs validators; metadata ``description`` goes to the API document.
        order: place among the truncation steps.
        full_row: the step needs every token that earlier steps left as a candidate (typical-p does), not only the
            most probable ones. Core's sampler shows all of them to every step; one on a device may show fewer.
    """

    name: str
    api_version: int
    request_fields: type[Any]
    order: int
    full_row: bool

    def create(self, fields: Any) -> TruncationStep | None:
        """The step for one request, or None when ``fields`` (an instance of ``request_fields``) is off."""
        ...
