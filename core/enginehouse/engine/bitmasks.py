"""Which tokens may be drawn at one position, applied to a row of logits.

Called by the sampler, after bias and penalties.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed

__all__ = ["TokenMask"]


@frozen(eq=False)
class TokenMask:
    """Allowed tokens.

    Attributes:
        bitmask: (ceil(vocab_size / 32),) int32, as :meth:`enginehouse.contract.structured.Matcher.fill_bitmask` writes
            it; None allows every token.
        banned: ids that are not allowed either, unless the bitmask allows nothing else: a text that is complete can
            only end, however few tokens it has.
    """

    bitmask: NDArray[np.int32] | None = None
    banned: frozenset[int] = frozenset()

    @classmethod
    def only(cls, token_id: int, vocab_size: int) -> TokenMask:
        """Allows a single token."""
        bitmask = np.zeros((vocab_size + 31) // 32, np.uint32)
        bitmask[token_id >> 5] = 1 << (token_id & 31)
        return cls(bitmask.view(np.int32))

    def permits(self, token_id: int) -> bool:
        """Whether one token is allowed."""
        if token_id in self.banned:
            return False
        return self.bitmask is None or bool((int(self.bitmask[token_id >> 5]) >> (token_id & 31)) & 1)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: (vocab_size,) float32.

        Raises:
            GenerationFailed: no allowed token has a finite logit.
        """
        if self.bitmask is not None:
            bits = np.unpackbits(self.bitmask.view(np.uint8), bitorder="little", count=len(logits))
            np.copyto(logits, -np.inf, where=bits == 0)
        if self.banned:
            token_ids = list(self.banned)
            before = logits[token_ids]
            logits[token_ids] = -np.inf
            if self.bitmask is not None and logits.max() == -np.inf:
                logits[token_ids] = before
        if logits.max() == -np.inf:
            raise GenerationFailed("No token that is allowed here could be drawn.")
