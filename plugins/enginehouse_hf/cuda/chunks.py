"""How many prompt tokens enter in one step: as many as may hold up those who decode in it."""

from __future__ import annotations

__all__ = ["CHUNK_S", "chunk_size"]

CHUNK_S = 0.025
"""How long such a step may take."""


def chunk_size(small: int, small_s: float, large: int, large_s: float) -> int:
    """As many tokens as fit into :data:`CHUNK_S`, given how long two numbers of tokens took.

    Launching the kernels takes a while however few tokens there are. Where that alone takes as long, a chunk is so
    large that its tokens take as long again.
    """
    token_s = large_s / large
    if large > small:
        token_s = max((large_s - small_s) / (large - small), token_s / 4)
    launches_s = max(large_s - large * token_s, 0.0)
    num_tokens = max(CHUNK_S - launches_s, launches_s) / token_s
    return max(256, int(num_tokens) // 256 * 256)
