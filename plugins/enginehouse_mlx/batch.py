"""The sequences and positions of one model call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

__all__ = ["Batch"]


@frozen(slots=False)
class Batch:
    """Spans of equal length in one forward pass: ``num_tokens`` new tokens of each slot from its start on.

    Attributes:
        reach: minimum number of positions that the pass attends to, even if its sequences are shorter, as in the masks
            made for it.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: int
    reach: int = 0
    _rows: dict[tuple[int, int], mx.array] = field(init=False, factory=dict, eq=False, repr=False)

    @property
    def max_length(self) -> int:
        """Number of positions that the pass attends to: the longest sequence length after it, or its reach."""
        return max(max(self.starts) + self.num_tokens, self.reach)

    def narrowed(self, rows: Sequence[int]) -> Batch:
        """Return a batch of some of the sequences, for masks of all of them."""
        slots, starts = (tuple(numbers[row] for row in rows) for numbers in (self.slots, self.starts))
        return Batch(slots, starts, self.num_tokens, self.max_length)

    @cached_property
    def offset(self) -> int | mx.array:
        """Position of the first new token: an int, or (B,) int32 for several sequences."""
        return self.starts[0] if len(self.starts) == 1 else mx.array(self.starts, mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        """Positions of the new tokens, (B, N) int32."""
        return mx.array(self._positions.astype(np.int32))

    def rows(self, num_heads: int, capacity: int) -> mx.array:
        """Return the rows of the new tokens, (B * num_heads * N,) uint32, in order of slot, head and position.

        They are rows of a memory of (slots, num_heads, capacity, head_dim) whose first three axes are joined. Layers of
        the same shape share the result.
        """
        shape = num_heads, capacity
        if shape not in self._rows:
            heads = np.array(self.slots, np.int64)[:, None] * num_heads + np.arange(num_heads)
            rows = heads[:, :, None] * capacity + self._positions[:, None]
            self._rows[shape] = mx.array(rows.reshape(-1).astype(np.uint32))
        return self._rows[shape]

    @property
    def _positions(self) -> NDArray[np.int64]:
        return np.array(self.starts, np.int64)[:, None] + np.arange(self.num_tokens)
