"""Applying a constraint's token bitmask to a row of logits.

Called by the sampler, after bias and penalties. Bit ``i % 32`` of word ``i // 32`` says whether id ``i``
is allowed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import GenerationFailed

__all__ = ["greedy_allowed", "is_allowed", "mask_logits"]


def is_allowed(bitmask: NDArray[np.int32], token_id: int) -> bool:
    """Whether the bitmask allows one token id."""
    return bool((int(bitmask[token_id >> 5]) >> (token_id & 31)) & 1)


def mask_logits(logits: NDArray[np.float32], bitmask: NDArray[np.int32]) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: (vocab_size,) float32.
        bitmask: (ceil(vocab_size / 32),) int32.

    Raises:
        GenerationFailed: no allowed token has a finite logit.
    """
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little", count=len(logits))
    np.copyto(logits, -np.inf, where=bits == 0)
    if logits.max() == -np.inf:
        raise GenerationFailed("The constraint allows no token that could be drawn here.")


def greedy_allowed(logits: NDArray[np.float32], best: int, bitmask: NDArray[np.int32]) -> int:
    """The allowed token with the largest logit; ``best`` is the largest of all, usually allowed already.

    Raises:
        GenerationFailed: no allowed token has a finite logit.
    """
    if is_allowed(bitmask, best):
        return best
    mask_logits(logits, bitmask)
    return int(logits.argmax())
