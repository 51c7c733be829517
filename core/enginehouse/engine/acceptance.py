"""How often drafted tokens agree with what is written, by drafter and by how sure it was.

A draft of a grade is taken for a row of tokens that each agree with the same probability, until one does not. That
probability is learned per model and, on top of it, per sequence: one text repeats itself, another does not.
"""

from __future__ import annotations

from attrs import define, field

from enginehouse.contract.drafter import NUM_GRADES

__all__ = ["AcceptanceRates", "expected_tokens"]

_MODEL_DECAY = 0.995  # of each grade's record, per token: what was true some hundred tokens ago counts little
_SEQUENCE_DECAY = 0.93
_PRIOR_TOKENS = 6.0  # a drafter's own guess counts like so many tokens
_MODEL_TOKENS = 8.0  # and what is known of the model like so many of the sequence's
_MAX_RATE = 0.995


def _zeros() -> list[float]:
    return [0.0] * NUM_GRADES


@define(eq=False)
class AcceptanceRates:
    """A record of tokens that agreed and did not.

    Attributes:
        prior: the rate of a grade before anything is known of it.
        above: the record that is asked instead of ``prior``; a model's, for that of a sequence.
    """

    prior: float = 0.5
    above: AcceptanceRates | None = None
    _agreed: list[float] = field(factory=_zeros)
    _tried: list[float] = field(factory=_zeros)

    def observe(self, grade: int, num_agreed: int, has_failed: bool) -> None:
        """Tokens of a draft of that grade agreed, and then one did not, unless they were the last."""
        decay = _SEQUENCE_DECAY if self.above is not None else _MODEL_DECAY
        num_tried = num_agreed + has_failed
        kept = decay**num_tried
        self._agreed[grade] = kept * self._agreed[grade] + num_agreed
        self._tried[grade] = kept * self._tried[grade] + num_tried
        if self.above is not None:
            self.above.observe(grade, num_agreed, has_failed)

    def rate(self, grade: int) -> float:
        """Probability that one more token of a draft of that grade agrees; below 1."""
        before, weight = (self.prior, _PRIOR_TOKENS) if self.above is None else (self.above.rate(grade), _MODEL_TOKENS)
        return min(_MAX_RATE, (self._agreed[grade] + weight * before) / (self._tried[grade] + weight))


def expected_tokens(rate: float, num_drafted: int) -> float:
    """Tokens that one forward pass gives on average: the drafted ones up to the first that fails, and one more.

    Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
    """
    return float((1.0 - rate ** (num_drafted + 1)) / (1.0 - rate))
