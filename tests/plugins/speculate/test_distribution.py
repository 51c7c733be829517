"""Sampled answers keep the model's distribution, whichever drafter writes ahead: paths of three tokens, by chi-square.

The drafts are used at every step (a pass costs the same for any number of tokens here), right ones and wrong ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import erfc
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.drafter import DraftContext, Drafter
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.settings.config import structure_options
from enginehouse_speculate.draft_model import DraftModelDrafter
from enginehouse_speculate.layers import LayersDrafter
from enginehouse_speculate.prediction import PredictionDrafter
from enginehouse_speculate.prompt_lookup import PromptLookupDrafter
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

WIDTH, LENGTH = 3, 3  # answers are longer: their last token may be half a character or an end, which are not told
NUM_REQUESTS, NUM_CHOICES = 500, 2
SAMPLING = {"temperature": 2.0, "top_k": WIDTH}
MODEL = FakeOptions(num_layers=4, slots=16, context=256, end_logit=-40.0)
TEXT = [ord(character) for character in "what comes next?"]
LEAST_P = 1e-4

Path = tuple[int, ...]


class EvenRunner(FakeRunner):
    """A pass of all layers takes one second, whatever it computes, and other passes nothing: drafts always pay."""

    seconds = 0.0

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        self.seconds += spans[0].num_layers is None
        return super().forward(spans)


def row_behind(runner: FakeRunner, token_ids: Sequence[int]) -> NDArray[np.float32]:
    sequence = runner.open_sequence()
    row = runner.forward([Span(sequence, 0, np.array(token_ids, np.int32))]).host()[0].copy()
    runner.free_sequence(sequence)
    return row


def expected(prompt: Sequence[int]) -> dict[Path, float]:
    """Probability of every path, from the model's logits alone."""
    runner, paths = FakeRunner(MODEL), {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Path, float] = {}
        for path, probability in paths.items():
            row = row_behind(runner, [*prompt, *path]).astype(np.float64)
            ids = np.argsort(-row, kind="stable")[:WIDTH]
            weights = np.exp((row[ids] - row[ids[0]]) / SAMPLING["temperature"])
            for token_id, share in zip(ids.tolist(), weights / weights.sum(), strict=True):
                longer[(*path, token_id)] = probability * float(share)
        paths = longer
    return paths


def prompt_that_repeats() -> list[int]:
    """A prompt whose last two tokens stood there before, and then a token that is likely to follow again."""

    def likelihood(token_id: int) -> float:
        row = row_behind(FakeRunner(MODEL), [*TEXT[-2:], token_id, *TEXT])
        return float(row[token_id] - row.max())

    return [*TEXT[-2:], max(range(ord("a"), ord("z") + 1), key=likelihood), *TEXT]


def drawn(
    drafter: Drafter, options: dict[str, Any], prompt: list[int], second: bool, on_device: bool
) -> tuple[Counter[Path], int, int]:
    """How often each path was written, and how many tokens were drafted and right."""
    runner = EvenRunner(evolve(MODEL, device_sampling=on_device))
    opener = (lambda: FakeRunner(MODEL)) if second else None
    bound = drafter.bind(DraftContext(runner, MODEL.slots, opener), structure_options(drafter.options, options, "it"))
    engine = StepEngine(
        runner, EngineSettings(slots=MODEL.slots), {}, clock=lambda: runner.seconds, drafters={"it": bound}
    )
    guess = max(expected(prompt).items(), key=lambda item: item[1])[0]
    counts: Counter[Path] = Counter()
    num_drafted = num_accepted = 0
    for seed in range(NUM_REQUESTS):
        request = EngineRequest(
            request_id=str(seed),
            sampling=SamplingParams(**SAMPLING, seed=seed),
            stopping=StopParams(max_tokens=LENGTH + 3, ignore_eos=True),
            num_choices=NUM_CHOICES,
            prediction_token_ids=guess,
        )
        engine.add(request, prompt)
        paths: dict[int, list[int]] = {choice: [] for choice in range(NUM_CHOICES)}
        while engine.has_work():
            for _, event in engine.step():
                if isinstance(event, RequestFinished):
                    num_drafted += event.usage.drafted_tokens
                    num_accepted += event.usage.accepted_draft_tokens
                elif isinstance(event, TextDelta):
                    paths[event.choice] += event.token_ids
        counts.update(tuple(path[:LENGTH]) for path in paths.values())
    engine.close()
    return counts, num_drafted, num_accepted


def chi_square_p(counts: Counter[Path], probabilities: dict[Path, float]) -> float:
    """How probable it is that draws differ at least as much; rare paths are put together (Wilson and Hilferty)."""
    total = sum(counts.values())
    cells = [(counts[path], total * share) for path, share in probabilities.items()]
    often = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        often.append((sum(seen for seen, _ in rare), sum(wanted for _, wanted in rare)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in often)
    freedom = len(often) - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 0.5 * erfc(z / 2**0.5)


@pytest.mark.parametrize(
    ("drafter", "options", "second", "on_device"),
    [
        (PredictionDrafter(), {}, False, False),
        (PredictionDrafter(), {}, False, True),
        (PromptLookupDrafter(), {}, False, False),
        (DraftModelDrafter(), {"min_probability": 0.0}, True, False),
        (LayersDrafter(), {"min_probability": 0.0, "num_layers": 3}, False, False),
        (LayersDrafter(), {"min_probability": 0.0}, True, False),
    ],
    ids=["prediction", "drawn on the device", "prompt-lookup", "draft-model", "layers", "layers-apart"],
)
def test_drafts_leave_the_distribution_alone(
    drafter: Drafter, options: dict[str, Any], second: bool, on_device: bool
) -> None:
    prompt = prompt_that_repeats()
    counts, num_drafted, num_accepted = drawn(drafter, options, prompt, second, on_device)
    probabilities = expected(prompt)

    assert counts.keys() <= probabilities.keys()
    assert num_drafted > num_accepted > 0
    assert chi_square_p(counts, probabilities) > LEAST_P
