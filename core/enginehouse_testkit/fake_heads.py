"""Draft head of the fake model: knows the hash that makes the logits, and doubts a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.drafter import NUM_GRADES, Draft, DraftTask
from enginehouse.contract.errors import ModelLoadError
from enginehouse_testkit.fake_model import FakeModel, State

__all__ = ["FAKE_HEAD", "FakeHead", "check_fake_head"]

FAKE_HEAD = "a head of the fake model"
"""Contents of the file of a fake head."""

_DOUBT = np.float32(0.3)


def check_fake_head(source: ModelSource) -> None:
    """Raise ModelLoadError unless the source is a file with :data:`FAKE_HEAD`."""
    if source.path is None or not source.path.is_file() or source.path.read_text() != FAKE_HEAD:
        raise ModelLoadError(f"{source.text}: not {FAKE_HEAD}")


@define(eq=False, kw_only=True)
class FakeHead:
    """See :class:`enginehouse.contract.drafter.BoundDrafter`.

    Attributes:
        state_of: returns the model's state at the end of a sequence.
    """

    model: FakeModel
    state_of: Callable[[int], State]
    max_tokens: int
    min_probability: float
    is_free: bool = False
    prior: float = 0.6

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> object:
        """See :class:`enginehouse.contract.drafter.BoundDrafter`."""
        return self

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """See :class:`enginehouse.contract.drafter.BoundDrafter`."""
        return [self._draft(task) for task in tasks]

    def close(self, _: object) -> None:
        """See :class:`enginehouse.contract.drafter.BoundDrafter`."""

    def shutdown(self) -> None:
        """See :class:`enginehouse.contract.drafter.BoundDrafter`."""

    def _draft(self, task: DraftTask) -> Draft | None:
        state, token_id = self.state_of(task.sequence), int(task.token_ids[-1])
        token_ids: list[int] = []
        first = 0.0
        while len(token_ids) < min(task.max_tokens, self.max_tokens):
            state = self.model.advance(state, token_id)
            row = self.model.logits(state) + _DOUBT * self.model.doubt(state)
            token_id = int(row.argmax())
            probability = float(1.0 / np.exp(row - row[token_id]).sum())
            if probability < self.min_probability:
                break
            first = first or probability
            token_ids.append(token_id)
        return Draft(token_ids, min(NUM_GRADES - 1, int(first * NUM_GRADES))) if token_ids else None
