"""The numpy sampler: the specification that every other implementation must match.

Order: the logit bias, then steps in their order (penalties, the temperature, top-k 10, top-p 30, min-p 40 and those of
plugins, unless the request lists them in another order), then the draw: the inverse of the cumulative probability, most
probable token first, ties by id, at a number that depends on seed, choice and position only. A token therefore never
depends on the other sequences of the batch, and can be sampled again. The mask of a constraint is applied before the
first step that is not a penalty. Each truncation sees the renormalised probabilities that the steps before it left. At
temperature 0 the most probable token after bias, penalties and mask is taken; other steps are ignored.

The chain of steps is built with the sampler, once per sequence. Steps that come first in nearly every order are taken
out of it and applied directly at no extra cost: penalties that change the row before any other step reads it, and a
fixed temperature after them.

Called by the engine loop, once per sequence and step. Does not know runners, batches or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, isfinite

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import LOWEST_LOGPROB, Sampled
from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.sampler import CORE_ORDER
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.constraints import TokenMask
from enginehouse.engine.sampling.candidates import (
    Head,
    LogitRow,
    MinP,
    RawLogprobs,
    Step,
    Temperature,
    TopK,
    TopP,
    bounded_temperature,
    pick,
    uniform,
)
from enginehouse.engine.sampling.penalties import LogitBias, Penalties, RowPenalty, TokenHistory
from enginehouse.engine.sampling.plugin_steps import PluginStep


@frozen(eq=False)
class Chain:
    """Processing of a row of logits after the bias.

    Attributes:
        changes: the penalties that come first; each changes the row in place.
        temperature: temperature of the row after these and the mask.
        steps: all other steps, in order.
        late_changes: the penalties among ``steps``; greedy sampling, which needs no other step, applies them as well.
    """

    changes: tuple[Callable[[NDArray[np.float32]], None], ...]
    temperature: float
    steps: tuple[Step, ...]
    late_changes: tuple[Callable[[NDArray[np.float32]], None], ...] = ()


def arrange(
    params: SamplingParams,
    vocab_size: int,
    penalties: Penalties | None,
    plugin_steps: Sequence[PluginStep],
    history: TokenHistory | None,
) -> Chain:
    """Build the chain of one sequence. ``history`` is required if a plugin step is a penalty or processor."""
    temperature = bounded_temperature(params.temperature)
    first = [step.bind(history, temperature) for step in plugin_steps if step.role == "processor"]
    others = [step for step in plugin_steps if step.role not in ("processor", "weights")]
    last = [step.bind(history, temperature) for step in plugin_steps if step.role == "weights"]
    places = [(step.order, step.bind(history, temperature)) for step in others]
    sets_temperature = any(step.name == "temperature" for _, step in places)
    core = _core_steps(params, vocab_size, penalties, None if sets_temperature else temperature)
    places += [(CORE_ORDER[step.name], step) for step in core]
    last = [step for step in last if params.samplers is None or step.name in params.samplers]
    return _split([*first, *_in_order(places, params.samplers), *last])


def _core_steps(
    params: SamplingParams, vocab_size: int, penalties: Penalties | None, temperature: float | None
) -> list[Step]:
    """Return core's steps that ``params`` enable."""
    steps: list[Step] = []
    if penalties is not None:
        steps.append(RowPenalty("penalties", penalties.apply))
    if temperature is not None and temperature != 1.0:
        steps.append(Temperature(temperature))
    if 0 < params.top_k < vocab_size:
        steps.append(TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopP(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinP(params.min_p))
    return steps


def _in_order(places: Iterable[tuple[int, Step]], listed: Sequence[str] | None) -> list[Step]:
    """Sort steps by order, then name; with ``listed``, return only the listed steps, in that order."""
    if listed is None:
        return [step for _, step in sorted(places, key=lambda place: (place[0], place[1].name))]
    by_name = {step.name: step for _, step in places}
    return [by_name[name] for name in listed if name in by_name]


def _split(steps: Sequence[Step]) -> Chain:
    changes: list[Callable[[NDArray[np.float32]], None]] = []
    rest = list(steps)
    for step in steps:
        if not isinstance(step, RowPenalty):
            break
        changes.append(step.change)
        rest.pop(0)
    first = rest[0] if rest else None
    temperature = first.value if isinstance(first, Temperature) else 1.0
    rest = rest[1:] if isinstance(first, Temperature) else rest
    late = tuple(step.change for step in rest if isinstance(step, RowPenalty))
    return Chain(tuple(changes), temperature, tuple(rest), late)


class SequenceSampler:
    """Samples the tokens of one sequence.

    Its state depends on the accepted tokens (for penalties, and for steps that follow sampled tokens); sampling does
    not change it.

    Args:
        params: sampling parameters.
        choice: index of the choice; an input of the random number.
        vocab_size: width of a row of logits.
        prompt_token_ids: prompt tokens for penalties.
        steps: the plugins' steps, from :func:`build_steps`.
        token_bytes: bytes of each id, for steps that use text.

    Attributes:
        vocab_size: width of a row of logits.
        last_probability: probability of the last token, as reported to following steps; None if not drawn at random.

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
        token_bytes: Sequence[bytes] = (),
    ) -> None:
        self._params = params
        self._choice = choice
        self.vocab_size = vocab_size
        self._bias = LogitBias(params.logit_bias, vocab_size) if params.logit_bias else None
        self._penalties = _penalties(params, prompt_token_ids)
        needs_history = any(step.role in ("penalty", "processor") for step in steps)
        self._history = TokenHistory(prompt_token_ids, token_bytes) if needs_history else None
        chain = arrange(params, vocab_size, self._penalties, steps, self._history)
        self._changes, self._temperature, self._steps = chain.changes, chain.temperature, chain.steps
        self._late_changes = chain.late_changes
        self._followers = tuple(step for step in steps if step.follows)
        self._drawn: tuple[int, float] | None = None  # last sampled token and its probability, until accepted
        self.last_probability: float | None = None

    @property
    def is_stateful(self) -> bool:
        """True if the state depends on the probabilities of sampled tokens, not on the tokens alone."""
        return bool(self._followers)

    @property
    def follows_tokens(self) -> bool:
        """True if the state depends on the accepted tokens."""
        return self._penalties is not None or self._history is not None or bool(self._followers)

    @property
    def penalties(self) -> Penalties | None:
        """Token counts of core's own penalties; None if these are off."""
        return self._penalties

    @property
    def _changes_logits(self) -> bool:
        return self._bias is not None or bool(self._changes or self._late_changes)

    def sample(self, logits: NDArray[np.float32], position: int, mask: TokenMask | None = None) -> Sampled:
        """Sample a token. Changes no state, but may overwrite ``logits``.

        Args:
            logits: (vocab_size,) float32, raw.
            position: position of the token in its sequence, counted from any fixed point.
            mask: tokens that may be sampled; None allows every token.

        Raises:
            GenerationFailed: the row contains NaN or +inf, no token can be sampled, or a plugin's step failed.
        """
        assert logits.shape == (self.vocab_size,)
        if self._params.num_logprobs is None:
            return Sampled(self._draw(logits, position, mask))
        if self._params.post_sampling_probs:
            return self._sample_with_probs(logits, position, mask, self._params.num_logprobs)
        with np.errstate(over="ignore"):
            row = LogitRow(logits, _maximum(logits))
            raw = RawLogprobs.of(row, self._params.num_logprobs)
        before = logits.copy() if self._changes_logits or mask is not None else logits
        token_id = self._draw(logits, position, mask, row)
        return Sampled(token_id, raw.logprob(float(before[token_id])), raw.top_ids, raw.top_logprobs)

    def _sample_with_probs(
        self, logits: NDArray[np.float32], position: int, mask: TokenMask | None, num_top: int
    ) -> Sampled:
        """Sample a token with the probabilities of the draw; at temperature 0 that of the token is 1."""
        drawn_from: list[tuple[LogitRow, Head | None]] = []
        token_id = self._draw(logits, position, mask, drawn_from=drawn_from)
        if not drawn_from:
            top_ids = LogitRow(logits, _maximum(logits)).top(num_top).token_ids
            return Sampled(token_id, 0.0, top_ids, np.where(top_ids == token_id, 0.0, LOWEST_LOGPROB))
        ((row, head),) = drawn_from
        if head is None:
            ids, total = row.top(num_top).token_ids, row.total
            weights = row.fast_weights[ids].astype(np.float64)
            own = float(row.fast_weights[token_id])
        else:
            weights = head.weights if head.drawn_by is None else head.drawn_by
            own, total = float(weights[head.token_ids == token_id][0]), float(weights.sum())
            order = np.argsort(-weights, kind="stable")[:num_top]
            ids, weights = head.token_ids[order], weights[order]
        with np.errstate(divide="ignore"):
            shown = np.clip(np.log(np.append(weights, own) / total), LOWEST_LOGPROB, 0.0)
        return Sampled(token_id, float(shown[-1]), ids, shown[:-1])

    def accept(self, token_id: int) -> None:
        """Append an accepted token to the state.

        Raises:
            GenerationFailed: a plugin's step failed.
        """
        if self._penalties:
            self._penalties.accept(token_id)
        if self._history is not None:
            self._history.accept(token_id)
        if self._followers:
            drawn, self._drawn = self._drawn, None
            self.last_probability = drawn[1] if drawn is not None and drawn[0] == token_id else None
            for step in self._followers:
                step.accept(token_id, self.last_probability)

    def recall(self, token_id: int, probability: float | None) -> None:
        """Set the probability of the next accepted token, drawn in another worker; None if not drawn at random."""
        self._drawn = (token_id, probability) if probability is not None else None

    def _draw(
        self,
        logits: NDArray[np.float32],
        position: int,
        mask: TokenMask | None,
        raw: LogitRow | None = None,
        drawn_from: list[tuple[LogitRow, Head | None]] | None = None,
    ) -> int:
        """Run all steps from the bias to the draw.

        Args:
            logits: (vocab_size,) float32.
            position: see :meth:`sample`, as for ``mask``.
            mask: see there.
            raw: the unchanged row, if it has been read already.
            drawn_from: gets the row after all steps and the tokens left of it, unless the token is not drawn at random.
        """
        unbiased = logits.copy() if self._bias and mask is not None else None
        if self._bias:
            _maximum(logits)  # before the bias: a forced token would hide an invalid row
            self._bias.apply(logits)
        for change in self._changes:
            change(logits)
        if self._params.temperature == 0:
            return self._best(logits, mask, unbiased)
        if mask is not None:
            _maximum(logits, self._bias)  # before the mask, which would hide an invalid row
            _apply_mask(mask, logits, unbiased)
        if raw is None or self._changes_logits or mask is not None or self._temperature != 1.0:
            raw = LogitRow(logits, _maximum(logits, self._bias), self._temperature)
        number = partial(uniform, self._params.seed, self._choice, position)
        with np.errstate(over="ignore"):
            row, head = self._truncate(raw, number)
            if drawn_from is not None:
                drawn_from.append((row, head))
            return row.draw(number()) if head is None else self._pick(head, number)

    def _best(self, logits: NDArray[np.float32], mask: TokenMask | None, unbiased: NDArray[np.float32] | None) -> int:
        """Return the most probable allowed token."""
        for change in self._late_changes:
            change(logits)
        token_id = int(logits.argmax())  # the first NaN, if there is one
        _check(float(logits[token_id]), self._bias)
        if mask is not None and not mask.permits(token_id):
            _apply_mask(mask, logits, unbiased)
            token_id = int(logits.argmax())
        return token_id

    def _truncate(self, row: LogitRow, number: partial[float]) -> tuple[LogitRow, Head | None]:
        """Run the steps; returns the row and the tokens left of it, None for all."""
        head: Head | None = None
        for step in self._steps:
            row, head = step.apply(row, head, number)
        return row, head

    def _pick(self, head: Head, number: partial[float]) -> int:
        """Draw from the tokens left."""
        place = pick(head.weights if head.drawn_by is None else head.drawn_by, number())
        token_id = int(head.token_ids[place])
        if self._followers:
            total = float(head.weights.sum())
            self._drawn = token_id, (float(head.weights[place]) / total if total else 1.0)
        return token_id


def _penalties(params: SamplingParams, prompt_token_ids: Sequence[int] | NDArray[np.int32]) -> Penalties | None:
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    num_last = params.repeat_last_n
    if not num_last or (repetition == 1.0 and not presence and not frequency):
        return None
    return Penalties(repetition, presence, frequency, prompt_token_ids, None if num_last < 0 else num_last)


def _apply_mask(mask: TokenMask, logits: NDArray[np.float32], unbiased: NDArray[np.float32] | None) -> None:
    """Mask a row in place; a bias that leaves no allowed token is undone, because the mask must hold."""
    try:
        mask.apply(logits)
    except GenerationFailed:
        if unbiased is None:
            raise
        logits[:] = unbiased
        mask.apply(logits)


def _maximum(logits: NDArray[np.float32], bias: LogitBias | None = None) -> float:
    """Return the largest logit and check it; a NaN anywhere in the row is found, because it is the maximum."""
    maximum = float(logits.max())
    _check(maximum, bias)
    return maximum


def _check(maximum: float, bias: LogitBias | None = None) -> None:
    if isfinite(maximum):
        return
    if maximum == -inf:
        raise GenerationFailed(
            "logit_bias bans every token that could be sampled" if bias else "the model gave no token a finite logit"
        )
    raise GenerationFailed(f"the model returned {maximum} among its logits")
