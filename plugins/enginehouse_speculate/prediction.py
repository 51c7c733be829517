"""Predicted outputs: the answer that a client expects (OpenAI's ``prediction``) is what is proposed.

An answer follows the prediction until they part; then the place is sought at which they meet again.
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
_START_GRADE = 4  # before the first token nothing has agreed, but the client did say so


@frozen
class PredictionOptions:
    """Settings of the drafter ``prediction``: none."""


@define(eq=False)
class PredictionDrafter:
    """What the plugin registers."""

    name: str = "prediction"
    api_version: int = 1
    options: type[PredictionOptions] = PredictionOptions

    def bind(self, _: DraftContext, __: PredictionOptions) -> BoundDrafter:
        """The drafter; nothing of it depends on the model."""
        return _Prediction()


@define(eq=False)
class _Session:
    """One answer and its prediction.

    Attributes:
        place: of the prediction's token that is due, as long as the two agree; behind it after they parted.
        num_agreed: tokens that agreed in a row; 0 after they parted.
        num_read: tokens of prompt and answer that were compared.
    """

    index: SuffixIndex
    num_read: int
    num_prompt: int
    place: int = 0
    num_agreed: int = 0
    has_parted: bool = False

    def read(self, token_ids: NDArray[np.int32]) -> None:
        """Compare what was written since."""
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
        """Look for the answer's last tokens in the prediction; without a match a token is taken for a replaced one."""
        match = self.index.find(token_ids[self.num_prompt :][-64:].tolist())
        if match is not None:
            self.place, self.num_agreed, self.has_parted = match.place, match.length, False


@define(eq=False)
class _Prediction:
    is_free: bool = True
    prior: float = 0.8

    def open(self, prompt: NDArray[np.int32], prediction: Sequence[int]) -> _Session | None:
        """A session where there is a prediction."""
        if not prediction:
            return None
        index = SuffixIndex(_MIN_MATCH)
        index.extend(prediction)
        return _Session(index, num_read=len(prompt), num_prompt=len(prompt))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """How the prediction goes on."""
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
        """Nothing is held."""

    def shutdown(self) -> None:
        """Nothing is held."""
