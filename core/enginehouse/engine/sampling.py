"""The numpy sampler: one specification that every other implementation must agree with.

Order: logit bias, penalties, mask, temperature, truncation steps by their ``order`` (core's own: top-k 10, top-p
30, min-p 40; plugins' in between), then the draw: the inverse of the running sum of probabilities, most
probable token first, ties by id, at a number that depends on seed, choice and position only. So a token
never depends on what else was in the batch, and can be drawn again. Each truncation step sees the
probabilities that the steps before it left, renormalised.

Called by the engine loop, once per sequence and step. Knows nothing of runners, batches or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, isfinite

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.engine.bitmasks import TokenMask
from enginehouse.engine.candidates import Head, LogitRow
from enginehouse.engine.draws import pick, uniform
from enginehouse.engine.logprobs import RawLogprobs
from enginehouse.engine.penalties import LogitBias, Penalties
from enginehouse.engine.truncation import PluginStep, Step, build_steps, core_steps
from enginehouse.errors import GenerationFailed
from enginehouse.types import SamplingParams

__all__ = ["PluginStep", "Sampled", "SequenceSampler", "build_steps"]

_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-30, 1e30  # beyond, float32 arithmetic leaves its range


@frozen(eq=False)
class Sampled:
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: its raw log-probability when the request asked for any, else None.
        top_ids: (num_logprobs,) int64, the most probable tokens of the raw model, best first; None like ``logprob``.
        top_logprobs: (num_logprobs,) float64, their raw log-probabilities.
    """

    token_id: int
    logprob: float | None = None
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float64] | None = None


class SequenceSampler:
    """Draws the tokens of one sequence.

    Its state is the multiset of accepted tokens (for the penalties), so ``rollback(n)`` leaves it as if the
    last ``n`` tokens had never been accepted.

    Args:
        params: how to draw.
        choice: index of the choice; part of what the draw depends on.
        vocab_size: width of a row of logits.
        prompt_token_ids: tokens that the repetition penalty counts as seen from the start.
        steps: the plugins' truncation steps, from :func:`build_steps`.

    Attributes:
        vocab_size: width of a row of logits.

    Raises:
        InvalidRequest: the logit bias has ids outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        choice: int,
        vocab_size: int,
        prompt_token_ids: Sequence[int] | NDArray[np.int32] = (),
        steps: Sequence[PluginStep] = (),
    ) -> None:
        self._params = params
        self._choice = choice
        self.vocab_size = vocab_size
        self._temperature = min(max(params.temperature, _LOWEST_TEMPERATURE), _HIGHEST_TEMPERATURE)
        self._bias = LogitBias(params.logit_bias, vocab_size) if params.logit_bias else None
        self._penalties = _penalties(params, prompt_token_ids)
        self._steps: list[Step] = sorted((*core_steps(params, vocab_size), *steps), key=lambda step: step.order)
        self._full_row = any(step.full_row for step in steps)
        self._num_accepted = 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is simply the argmax of the raw row, with no logprobs asked for."""
        params = self._params
        return params.temperature == 0 and params.num_logprobs is None and not self._changes_logits

    @property
    def _changes_logits(self) -> bool:
        return self._bias is not None or self._penalties is not None

    def sample(self, logits: NDArray[np.float32], position: int, mask: TokenMask | None = None) -> Sampled:
        """Draw a token. Changes no state, but may overwrite ``logits``.

        Args:
            logits: (vocab_size,) float32, raw.
            position: position of the token in its sequence, counted from any fixed point.
            mask: which tokens may be drawn; None allows every one.

        Raises:
            GenerationFailed: the row holds NaN or +inf, no token can be drawn, or a plugin's step failed.
        """
        assert logits.shape == (self.vocab_size,)
        if self._params.num_logprobs is None:
            return Sampled(self._draw(logits, position, mask))
        with np.errstate(over="ignore"):
            row = LogitRow(logits, _maximum(logits))
            raw = RawLogprobs.of(row, self._params.num_logprobs)
        before = logits.copy() if self._changes_logits or mask is not None else logits
        token_id = self._draw(logits, position, mask, row)
        return Sampled(token_id, raw.logprob(float(before[token_id])), raw.top_ids, raw.top_logprobs)

    def accept(self, token_id: int) -> None:
        """The sequence grew by ``token_id``."""
        self._num_accepted += 1
        if self._penalties:
            self._penalties.accept(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take the last ``num_tokens`` accepted tokens back."""
        assert 0 <= num_tokens <= self._num_accepted
        self._num_accepted -= num_tokens
        if self._penalties:
            self._penalties.rollback(num_tokens)

    def _draw(
        self,
        logits: NDArray[np.float32],
        position: int,
        mask: TokenMask | None,
        raw: LogitRow | None = None,
    ) -> int:
        """Steps from the bias to the draw. ``raw`` is the row as it came, when somebody has read it already."""
        unbiased = logits.copy() if self._bias and mask is not None else None
        if self._bias:
            _maximum(logits)  # a forced token would hide a broken row
            self._bias.apply(logits)
        if self._penalties:
            self._penalties.apply(logits)
        if self._params.temperature == 0:
            token_id = int(logits.argmax())  # the first NaN, if there is one
            _check(float(logits[token_id]), self._bias)
            if mask is not None and not mask.permits(token_id):
                _apply_mask(mask, logits, unbiased)
                token_id = int(logits.argmax())
            return token_id
        if mask is not None:
            _maximum(logits, self._bias)  # the mask would hide a broken row
            _apply_mask(mask, logits, unbiased)
        if raw is None or self._changes_logits or mask is not None or self._temperature != 1.0:
            raw = LogitRow(logits, _maximum(logits, self._bias), self._temperature)
        number = partial(uniform, self._params.seed, self._choice, position)
        with np.errstate(over="ignore"):
            if not self._steps:
                return raw.draw(number())
            head = self._truncate(raw, number)
        return int(head.token_ids[pick(head.weights, number())])

    def _truncate(self, row: LogitRow, number: partial[float]) -> Head:
        if self._full_row:
            head, later = row.whole(), self._steps
        else:
            head, later = self._steps[0].start(row, number), self._steps[1:]
        for step in later:
            head = step.narrow(row, head, number)
        return head


def _penalties(params: SamplingParams, prompt_token_ids: Sequence[int] | NDArray[np.int32]) -> Penalties | None:
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if repetition == 1.0 and not presence and not frequency:
        return None
    return Penalties(repetition, presence, frequency, prompt_token_ids)


def _apply_mask(mask: TokenMask, logits: NDArray[np.float32], unbiased: NDArray[np.float32] | None) -> None:
    """Mask a row in place; a bias that leaves nothing of what is allowed is ignored here, for the mask must hold."""
    try:
        mask.apply(logits)
    except GenerationFailed:
        if unbiased is None:
            raise
        logits[:] = unbiased
        mask.apply(logits)


def _maximum(logits: NDArray[np.float32], bias: LogitBias | None = None) -> float:
    """The largest logit; NaN when there is one in the row, so this also checks it."""
    maximum = float(logits.max())
    _check(maximum, bias)
    return maximum


def _check(maximum: float, bias: LogitBias | None = None) -> None:
    if isfinite(maximum):
        return
    if maximum == -inf:
        raise GenerationFailed(
            "logit_bias bans every token that could be drawn" if bias else "the model gave no token a finite logit"
        )
    raise GenerationFailed(f"the model returned {maximum} among its logits")
