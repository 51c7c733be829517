"""The most probable token of a row of logits, and how sure a model is of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginehouse.drafting import NUM_GRADES

__all__ = ["best_token", "grade_of_probability"]


def best_token(row: NDArray[np.float32]) -> tuple[int, float]:
    """The token with the largest logit, and its probability.

    Args:
        row: (vocab_size,) float32.
    """
    token_id = int(row.argmax())
    return token_id, float(1.0 / np.exp(row - row[token_id]).sum())


def grade_of_probability(probability: float) -> int:
    """The grade of a draft whose first token has this probability."""
    return min(NUM_GRADES - 1, int(probability * NUM_GRADES))
