"""Number of prompt tokens per step, limited by the delay of the sequences that decode in it."""

from __future__ import annotations

__all__ = ["CHUNK_S", "chunk_size"]

CHUNK_S = 0.025
"""Maximum duration of such a step in seconds."""


def chunk_size(small: int, small_s: float, large: int, large_s: float) -> int:
    """Number of tokens that fit into :data:`CHUNK_S`, given the measured times of two sizes.

    Launching the kernels has a constant cost. If that alone exceeds the limit, the chunk is sized so that its tokens
    take as long again.
    """
    token_s = large_s / large
    if large > small:
        token_s = max((large_s - small_s) / (large - small), token_s / 4)
    launches_s = max(large_s - large * token_s, 0.0)
    num_tokens = max(CHUNK_S - launches_s, launches_s) / token_s
    return max(256, int(num_tokens) // 256 * 256)
