"""What the tests of the samplers share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.sampler import Candidates


def make_candidates(
    logits: NDArray[np.float32], temperature: float = 1.0, number: float = 0.0, count: int | None = None
) -> Candidates:
    """The first ``count`` candidates of a row, as core would show them."""
    token_ids = np.lexsort((np.arange(logits.size), -logits))[:count].astype(np.int32)
    token_ids = token_ids[logits[token_ids] > -np.inf]
    scaled = (logits[token_ids] / np.float32(temperature)).astype(np.float32)
    return Candidates(token_ids, scaled, logits, temperature, lambda purpose: number)


@pytest.fixture(scope="session")
def candidates_of() -> Callable[..., Candidates]:
    """See :func:`make_candidates`."""
    return make_candidates
