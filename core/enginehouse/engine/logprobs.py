"""Log-probabilities of the raw model at one position, for the sampler and for prompt scoring.

Raw means: the log-softmax of the logits as the model gave them, before bias, penalties, temperature and
truncation, natural logarithm.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.engine.candidates import LogitRow

__all__ = ["RawLogprobs"]

_LOWEST = -9999.0  # what OpenAI's API reports for "impossible"; JSON has no -inf


@frozen(eq=False)
class RawLogprobs:
    """The log-softmax of one raw row: the best tokens now, any other token through its logit.

    Attributes:
        top_ids: (num_top,) int64, best first.
        top_logprobs: (num_top,) float64.
        normaliser: log of the sum of exponentials of the row.
    """

    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    normaliser: float

    @classmethod
    def of(cls, row: LogitRow, num_top: int) -> RawLogprobs:
        """Read ``row``, which must be at temperature 1."""
        assert row.temperature == 1.0
        normaliser = row.maximum + float(np.log(row.total))
        top_ids = row.top(num_top).token_ids if num_top else np.empty(0, np.int64)
        top_logprobs = np.minimum(row.logits[top_ids].astype(np.float64) - normaliser, 0.0)
        return cls(top_ids, top_logprobs, normaliser)

    def logprob(self, logit: float) -> float:
        """The log-probability of a token with this raw logit, at most 0 and never -inf."""
        return min(max(logit - self.normaliser, _LOWEST), 0.0)
