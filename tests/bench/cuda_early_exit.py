"""Early exit on one GPU, over the shape of a large model: a part of ``bench.cuda``, which opens the model.

Random weights are never sure of a token, so that every question is asked for nothing; with each token chained to the
next one, every layer is sure, so that every token leaves where it is first asked. What models in between cost lies in
between. Agreement says something about real weights only; it is measured here all the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from enginehouse.contract.exit_policy import ExitContext
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_early_exit.calibration import Measured, Setting, calibrate
from enginehouse_early_exit.policies import EntropyPolicy, MarginPolicy, SaturationPolicy

from .cuda_speculation import chain_tokens

__all__ = ["measure_early_exit"]

_NUM_ROUNDS = 5
_NUM_PASSAGES, _NUM_PROMPT, _NUM_ANSWER = 3, 24, 32
_THRESHOLDS = {"margin": (0.8,), "entropy": (0.4,), "saturation": (0.9, 0.98)}
_BLOCK = 50
_POLICIES = (MarginPolicy(), EntropyPolicy(), SaturationPolicy())


def measure_early_exit(runner: Any, embeddings: Tensor, head: Tensor) -> Iterator[str]:
    """Lines of two tables, each followed by speeds of whole requests.

    Args:
        runner: of a model with random weights, with eight slots or more.
        embeddings: its weights, (vocab_size, hidden_size); changed.
        head: of its output projection, of the same shape and not the same tensor; changed.
    """
    for what in ("random weights, no layer is sure", "tokens chained, every layer is sure"):
        yield f"early exit, {what}:"
        yield from _table(runner)
        for num_clients in (1, 8):
            yield from _requests(runner, num_clients)
        chain_tokens(embeddings, head, _BLOCK)


def _table(runner: Any) -> Iterator[str]:
    """Token by token, logits read by the host, as ``enginehouse calibrate early-exit`` does it."""
    rng = np.random.default_rng(0)
    size = _NUM_PROMPT + _NUM_ANSWER + 1
    parts = [rng.integers(300, runner.info.vocab_size - 1, size).astype(np.int32) for _ in range(_NUM_PASSAGES)]
    layers = sorted({min(round(runner.num_layers * share), runner.num_layers - 1) for share in (0.5, 0.75, 0.9)})
    settings = [
        Setting(policy=policy, layer=layer, threshold=threshold)
        for policy, thresholds in _THRESHOLDS.items()
        for layer in layers
        for threshold in thresholds
    ]
    plain, measured = calibrate(runner, parts, _NUM_PROMPT, settings)
    yield "| policy | layer | threshold | agreement | left early | mean layers | tokens/s | speed |"
    yield "|---|---|---|---|---|---|---|---|"
    yield _row("all layers |  | ", plain)
    for one in measured:
        assert one.setting is not None
        yield _row(f"{one.setting.policy} | {one.setting.layer} | {one.setting.threshold:g}", one)


def _row(name: str, one: Measured) -> str:
    return (
        f"| {name} | {one.agreement:.3f} | {one.share_left:.2f} | {one.mean_layers:.1f} | {one.tokens_per_s:.1f} | "
        f"{one.speed:.2f} |"
    )


def _requests(runner: Any, num_clients: int) -> Iterator[str]:
    """Whole requests through the engine, tokens drawn on the device, with and without each policy in turn."""
    context = ExitContext(runner.num_layers, runner.capabilities.exit_layers)
    options = {"min_layer": runner.num_layers // 2, "every": runner.num_layers}
    policies: dict[str, Any] = {"all layers": None} | {
        policy.name: policy.bind(context, policy.options(threshold=_THRESHOLDS[policy.name][0], **options))
        for policy in _POLICIES
    }
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    left = dict.fromkeys(policies, 0)
    for round_number in range(-1, _NUM_ROUNDS):
        for name, policy in policies.items():
            runner.use_exit_policy(policy)
            speed, num_left = _run(runner, num_clients, round_number)
            if round_number >= 0:
                speeds[name].append(speed)
                left[name] = num_left
        runner.use_exit_policy(None)
    plain = speeds["all layers"]
    for name, own in speeds.items():
        ratios = [mine / theirs for mine, theirs in zip(own, plain, strict=True)]
        yield (
            f"  {num_clients} at once, {name}: {statistics.median(own):.1f} tok/s, {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) of all layers; {left[name]} of {num_clients * 200} tokens left "
            f"behind layer {runner.num_layers // 2}"
        )


def _run(runner: Any, num_clients: int, seed: int) -> tuple[float, int]:
    """Tokens per second behind the first ones, and how many tokens left early."""
    engine = StepEngine(runner, EngineSettings(slots=8, prefix_cache=False), {})
    rng = np.random.default_rng(seed + 1)
    for index in range(num_clients):
        sampling = SamplingParams(temperature=0.6, seed=index)
        stopping = StopParams(max_tokens=200, ignore_eos=True)
        prompt = rng.integers(300, runner.info.vocab_size - 1, 200).tolist()
        engine.add(EngineRequest(request_id=str(index), sampling=sampling, stopping=stopping), prompt)
    started, seen, num_tokens, num_left = 0.0, set(), 0, 0
    while engine.has_work():
        for request_id, event in engine.step():
            if isinstance(event, TextDelta):
                num_tokens += len(event.token_ids) if started else 0
                seen.add(request_id)
            elif isinstance(event, RequestFinished):
                num_left += event.usage.early_exit_tokens
        if not started and len(seen) == num_clients:
            started = time.perf_counter()
    return num_tokens / (time.perf_counter() - started), num_left
