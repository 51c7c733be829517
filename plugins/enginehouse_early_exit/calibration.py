"""Measures cost and gain of policies on a text: the real runner decodes every token with each setting in turn.

The text is split into passages. The beginning of each is a prompt; the rest is fed token by token, as if the model had
generated it, so that all settings see the same tokens and are compared at the same positions. Settings alternate on
every passage, and the whole model decodes the passage again next to each of them, so that other load on the machine
affects both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Span
from enginehouse.contract.exit_policy import BoundExitPolicy, ExitContext, ExitOutput, LayerAccess
from enginehouse_early_exit.policies import EntropyPolicy, MarginPolicy, SaturationPolicy

__all__ = ["THRESHOLDS", "Measured", "Setting", "calibrate", "grid", "passages"]

THRESHOLDS: dict[str, tuple[float, ...]] = {
    "margin": (0.6, 0.8, 0.95),
    "entropy": (1.0, 0.4, 0.1),
    "saturation": (0.9, 0.95, 0.98),
}
"""Thresholds to try, for each policy from loose to strict."""

_POLICIES: dict[str, Any] = {policy.name: policy for policy in (MarginPolicy(), EntropyPolicy(), SaturationPolicy())}


@frozen(kw_only=True)
class Setting:
    """A policy that is evaluated once, after one layer."""

    policy: str
    layer: int
    threshold: float

    def bind(self, runner: LayerAccess) -> BoundExitPolicy:
        """Return the policy for the runner's model."""
        chosen = _POLICIES[self.policy]
        options = chosen.options(min_layer=self.layer, every=runner.num_layers, threshold=self.threshold)
        bound: BoundExitPolicy = chosen.bind(ExitContext(runner.num_layers, runner.capabilities.exit_layers), options)
        return bound

    def to_toml(self, num_layers: int) -> str:
        """Format it as in a model's settings."""
        return (
            f'exit_policy = {{ name = "{self.policy}", threshold = {self.threshold}, min_layer = {self.layer}, '
            f"every = {num_layers} }}"
        )


@define(eq=False)
class Measured:
    """Results of one setting over all passages so far; None is the whole model.

    Attributes:
        seconds: time of each passage.
        plain_seconds: time of the whole model on the same passages, at about the same time.
        num_agreeing: tokens whose most probable successor equals that of the whole model.
        num_layers_run: number of layers run, over all tokens.
        surprise: sum of the negative log-probabilities of the tokens that follow in the text, in nats.
    """

    setting: Setting | None
    num_tokens: int = 0
    num_agreeing: int = 0
    num_left: int = 0
    num_layers_run: int = 0
    surprise: float = 0.0
    seconds: list[float] = field(factory=list)
    plain_seconds: list[float] = field(factory=list)

    @property
    def agreement(self) -> float:
        """Share of tokens that agree with the whole model."""
        return self.num_agreeing / self.num_tokens

    @property
    def share_left(self) -> float:
        """Share of tokens that exited early."""
        return self.num_left / self.num_tokens

    @property
    def mean_layers(self) -> float:
        """Mean number of layers per token."""
        return self.num_layers_run / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Perplexity of the text."""
        return float(np.exp(self.surprise / self.num_tokens))

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second."""
        return self.num_tokens / sum(self.seconds)

    @property
    def speed(self) -> float:
        """Speed-up over the whole model: the median over the passages."""
        return median(self._speeds)

    @property
    def least_speed(self) -> float:
        """Smallest speed-up of any passage."""
        return min(self._speeds)

    @property
    def _speeds(self) -> list[float]:
        return [plain / own for plain, own in zip(self.plain_seconds, self.seconds, strict=True)]


def grid(layers: Sequence[int], policies: Sequence[str]) -> list[Setting]:
    """Return every policy with each of its thresholds after each layer."""
    return [
        Setting(policy=policy, layer=layer, threshold=threshold)
        for policy in policies
        for layer in layers
        for threshold in THRESHOLDS[policy]
    ]


def passages(token_ids: Sequence[int], prompt_tokens: int, answer_tokens: int, most: int) -> list[NDArray[np.int32]]:
    """Split the text into parts of ``prompt_tokens + answer_tokens + 1``, at most ``most`` of them, evenly spaced."""
    size = prompt_tokens + answer_tokens + 1
    parts = [np.array(token_ids[start : start + size], np.int32) for start in range(0, len(token_ids) - size + 1, size)]
    if len(parts) <= most:
        return parts
    return [parts[index * len(parts) // most] for index in range(most)]


def calibrate(
    runner: LayerAccess,
    parts: Sequence[NDArray[np.int32]],
    prompt_tokens: int,
    settings: Sequence[Setting],
    report: Callable[[], object] = lambda: None,
) -> tuple[Measured, list[Measured]]:
    """Measure the whole model and each setting.

    Args:
        runner: must have no open sequence.
        parts: passages, each longer than ``prompt_tokens + 1``.
        prompt_tokens: number of tokens of each that all layers compute beforehand.
        settings: settings to measure.
        report: called after each setting of each passage.
    """
    plain, measured = Measured(None), [Measured(setting) for setting in settings]
    bound: list[BoundExitPolicy | None] = [setting.bind(runner) for setting in settings]
    prefix = np.array(runner.tokenizer.prefix_token_ids, np.int32)
    _warm_up(runner, np.concatenate([prefix, parts[0]]), bound)
    for part in parts:
        whole, num_prompt = np.concatenate([prefix, part]), len(prefix) + prompt_tokens
        best, plain_s = _decode(runner, plain, whole, num_prompt, None)
        plain.num_agreeing += len(best)
        plain.plain_seconds.append(plain_s)
        for one, policy in zip(measured, bound, strict=True):
            found, _ = _decode(runner, one, whole, num_prompt, policy)
            one.num_agreeing += sum(left == right for left, right in zip(found, best, strict=True))
            _, beside_s = _decode(runner, Measured(None), whole, num_prompt, None)  # the machine's load varies
            one.plain_seconds.append(beside_s)
            report()
    return plain, measured


def _warm_up(runner: LayerAccess, token_ids: NDArray[np.int32], policies: Sequence[BoundExitPolicy | None]) -> None:
    """Run the first passes, which allocate memory."""
    for policy in (None, *policies):
        _decode(runner, Measured(None), token_ids[:8], 4, policy)


def _decode(
    runner: LayerAccess,
    measured: Measured,
    token_ids: NDArray[np.int32],
    num_prompt: int,
    policy: BoundExitPolicy | None,
) -> tuple[list[int], float]:
    """Feed one passage; return the most probable token after each position, and the decoding time in seconds."""
    runner.use_exit_policy(None)
    sequence = runner.open_sequence()
    best: list[int] = []
    try:
        runner.forward([Span(sequence, 0, token_ids[:num_prompt], "none")])
        runner.use_exit_policy(policy)
        seconds = 0.0
        for row, layer, taken_s in _steps(runner, sequence, token_ids, num_prompt):
            seconds += taken_s
            following = int(token_ids[num_prompt + len(best) + 1])
            measured.num_tokens += 1
            measured.num_layers_run += layer
            measured.num_left += layer < runner.num_layers
            measured.surprise += _surprise(row, following)
            best.append(int(row.argmax()))
    finally:
        runner.use_exit_policy(None)
        runner.free_sequence(sequence)
    measured.seconds.append(seconds)
    return best, seconds


def _steps(
    runner: LayerAccess, sequence: int, token_ids: NDArray[np.int32], start: int
) -> Iterator[tuple[NDArray[np.float32], int, float]]:
    """Yield for each token: the row of logits, the number of layers it ran through, and the time in seconds."""
    for place in range(start, len(token_ids) - 1):
        began = time.perf_counter()
        output = runner.forward([Span(sequence, place, token_ids[place : place + 1], may_exit=True)])
        row = output.host()[0]
        taken_s = time.perf_counter() - began
        yield row, output.exit_layers[0] if isinstance(output, ExitOutput) else runner.num_layers, taken_s


def _surprise(row: NDArray[np.float32], token_id: int) -> float:
    """Negative log-probability of a token, in nats."""
    logits = row.astype(np.float64)
    maximum = float(logits.max())
    return maximum + float(np.log(np.exp(logits - maximum).sum())) - float(logits[token_id])
