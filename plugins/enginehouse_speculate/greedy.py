"""Greedy drafting with a model, one token per forward pass for all drafts, until the confidence is too low."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.drafter import NUM_GRADES, Draft

__all__ = ["GreedyDraft", "write_greedily"]


@define(eq=False, kw_only=True)
class GreedyDraft:
    """One draft under construction.

    Attributes:
        due: tokens that the next forward pass computes; empty when the draft is finished.
        max_tokens: longest draft.
        min_probability: the draft ends before a token that is less probable than this.
        token_ids: the draft so far.
    """

    due: list[int]
    max_tokens: int
    min_probability: float
    token_ids: list[int] = field(factory=list)
    _first_probability: float = 0.0

    def take(self, row: NDArray[np.float32]) -> None:
        """Append the most probable token of a row of logits, (vocab_size,) float32, or end the draft."""
        token_id = int(row.argmax())
        probability = float(1.0 / np.exp(row - row[token_id]).sum())
        self.due = []
        if probability < self.min_probability:
            return
        self._first_probability = self._first_probability or probability
        self.token_ids.append(token_id)
        if len(self.token_ids) < self.max_tokens:
            self.due = [token_id]

    def finished(self) -> Draft | None:
        """Return the draft, graded by the probability of its first token, or None if it is empty."""
        if not self.token_ids:
            return None
        return Draft(self.token_ids, min(NUM_GRADES - 1, int(self._first_probability * NUM_GRADES)))


_D = TypeVar("_D", bound=GreedyDraft)


def write_greedily(drafts: Sequence[_D], forward: Callable[[Sequence[_D]], NDArray[np.float32] | None]) -> None:
    """Extend drafts until they end.

    Args:
        drafts: drafts with tokens due.
        forward: computes the due tokens of some drafts; returns one row of logits for each, or None if there is no
            memory, which ends the drafts.
    """
    growing = [draft for draft in drafts if draft.due]
    while growing:
        rows = forward(growing)
        if rows is None:
            return
        for draft, row in zip(growing, rows, strict=True):
            draft.take(row)
        growing = [draft for draft in growing if draft.due]
