"""The sequences and positions of one model call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
from attrs import frozen

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
    def columns(self) -> tuple[mx.array, mx.array]:
        """Slots (B, 1) and positions (B, N) of the new tokens."""
        starts = mx.array(self.starts, mx.int32)[:, None]
        return mx.array(self.slots, mx.int32)[:, None], starts + mx.arange(self.num_tokens, dtype=mx.int32)
