"""Predicted outputs: drafts from the answer that a client expects (OpenAI's ``prediction``).

An answer follows the prediction until they diverge; then the position where they match again is searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from enginehouse.contract.drafter import BoundDrafter, Draft, DraftContext, DraftTask
from enginehouse_speculate.suffix_index import SuffixIndex, grade_of

__all__ = ["PredictionDrafter", "PredictionOptions"]

_MIN_MATCH = 2
_START_GRADE = 4  # no token has agreed yet, but the client expects this answer


@frozen
class PredictionOptions:
    """Settings of the drafter ``prediction``: none."""


@define(eq=False)
class PredictionDrafter:
    """The registered drafter."""

    name: str = "prediction"
    api_version: int = 1
    options: type[PredictionOptions] = PredictionOptions

    def bind(self, _: DraftContext, __: PredictionOptions) -> BoundDrafter:
        """Return the drafter, which does not depend on the model."""
        return _Prediction()


@define(eq=False)
class _Session:
    """One answer and its prediction.

    Attributes:
        place: position of the next predicted token while the two agree; the position after it once they diverged.
        num_agreed: number of consecutive tokens that agreed; 0 after they diverged.
        num_read: number of tokens of prompt and answer that were compared.
    """

    index: SuffixIndex
    num_read: int
    num_prompt: int
    place: int = 0
    num_agreed: int = 0
    has_parted: bool = False

    def read(self, token_ids: NDArray[np.int32]) -> None:
        """Compare the tokens generated since the last call."""
        text = self.index.token_ids
        for token_id in token_ids[self.num_read :].tolist():
            agrees = self.place < len(text) and text[self.place] == token_id
            self.num_agreed = self.num_agreed + 1 if agrees else 0
            self.has_parted = self.has_parted or not agrees
            self.place += 1
        self.num_read = len(token_ids)
        if self.has_parted and self.num_agreed < _MIN_MATCH:
            self._meet_again(token_ids)

    def _meet_again(self, token_ids: NDArray[np.int32]) -> None:
        """Search the answer's last tokens in the prediction; without a match, assume that one token was replaced."""
        match = self.index.find(token_ids[self.num_prompt :][-64:].tolist())
        if match is not None:
            self.place, self.num_agreed, self.has_parted = match.place, match.length, False


@define(eq=False)
class _Prediction:
    is_free: bool = True
    prior: float = 0.8

    def open(self, prompt: NDArray[np.int32], prediction: Sequence[int]) -> _Session | None:
        """Return a session if there is a prediction."""
        if not prediction:
            return None
        index = SuffixIndex(_MIN_MATCH)
        index.extend(prediction)
        return _Session(index, num_read=len(prompt), num_prompt=len(prompt))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft the continuation of the prediction."""
        return [self._propose(task) for task in tasks]

    def _propose(self, task: DraftTask) -> Draft | None:
        session: _Session = task.session
        session.read(task.token_ids)
        following = session.index.after(session.place, task.max_tokens)
        if not following:
            return None
        is_start = len(task.token_ids) == session.num_prompt
        return Draft(following, _START_GRADE if is_start else grade_of(session.num_agreed))

    def close(self, _: _Session) -> None:
        """Nothing to release."""

    def shutdown(self) -> None:
        """Nothing to release."""
