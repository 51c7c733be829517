"""Tokens drawn by MLX are those that core's sampler draws, and an engine that draws ahead gives the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from enginehouse.contract.backend import Draw, LastSampled, ModelSource, Span
from enginehouse.contract.errors import InvalidSpan
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.candidates import uniform
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.backend_contract import ModelUnderTest
from enginehouse_testkit.contract.device_draws import DeviceDrawsContract, prompts_of
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.runner_contract import RunnerContract

pytestmark = pytest.mark.mlx

TinyModel = Callable[[str], Path]


def _open(path: Path, **options: Any) -> Any:
    settings = MlxOptions(**{"context": 128, "slots": 4, "draws": "mlx", **options})
    return MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _draws(params: list[SamplingParams], position: int) -> list[Draw]:
    return [
        Draw(row=i, sequence=i, sampling=one, number=uniform(one.seed, 0, position)) for i, one in enumerate(params)
    ]


@pytest.fixture(scope="module")
def llama(tiny_model: TinyModel) -> Iterator[Any]:
    runner = _open(tiny_model("llama"))
    yield runner
    runner.close()


class TestDrawingRunner(RunnerContract, EngineContract):
    """The contracts of runners and engines, with every token drawn by MLX."""

    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: TinyModel) -> ModelUnderTest:
        path = tiny_model("llama")
        options = MlxOptions(context=64, slots=4, max_batch_tokens=128, draws="mlx")
        return ModelUnderTest(backend=MlxBackend(), source=ModelSource(str(path), path), options=options)


class TestDraws(DeviceDrawsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: TinyModel) -> ModelUnderTest:
        source = ModelSource("llama", tiny_model("llama"))
        options = MlxOptions(context=128, slots=4, draws="mlx")
        return ModelUnderTest(backend=MlxBackend(), source=source, options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def plain_model(cls, model: ModelUnderTest) -> ModelUnderTest:
        return evolve(model, options=evolve(model.options, draws="core"))


@pytest.mark.parametrize("vocab_size", [700, 49_152])
@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_equal_seeds_draw_the_tokens_of_cores_sampler(vocab_size: int, spread: float) -> None:
    """Any settings in one batch; a row of equal logits, and one with a single token, too."""
    import mlx.core as mx

    from enginehouse_mlx.sampling import draw_rows

    rng, num_rows = np.random.default_rng(vocab_size), 96
    rows = (rng.normal(size=(num_rows, vocab_size)) * spread).astype(np.float32)
    rows[1, 5], rows[2], rows[3], rows[3, 7] = -np.inf, 0.0, -np.inf, 1.0
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 1, 3, 40])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 0.0])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=seed,
        )
        for seed in range(num_rows)
    ]
    tokens = draw_rows(mx.array(rows), _draws(params, 3)).tolist()
    expected = [
        SequenceSampler(one, choice=0, vocab_size=vocab_size).sample(row.copy(), 3).token_id
        for one, row in zip(params, rows, strict=True)
    ]

    assert tokens == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_frequencies_are_those_of_the_probabilities(params: SamplingParams) -> None:
    """20,000 draws of one row against the probabilities that its definition gives, by chi-square."""
    import mlx.core as mx

    from enginehouse_mlx.sampling import draw_rows

    num_draws = 20_000
    row = np.random.default_rng(5).normal(size=20).astype(np.float32) * 1.5
    numbers = np.random.default_rng(6).random(num_draws)
    draws = [Draw(row=0, sequence=0, sampling=params, number=float(number)) for number in numbers]
    tokens = np.asarray(draw_rows(mx.array(np.broadcast_to(row, (num_draws, 20)).copy()), draws))
    expected = _probabilities(row, params) * num_draws
    counts = np.bincount(tokens, minlength=20)
    kept = expected > 0

    assert not counts[~kept].any()
    chi_square = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    assert chi_square < _critical(int(kept.sum()) - 1)


def _probabilities(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """By the definition of each step, over sorted probabilities in float64."""
    order = np.argsort(-row, kind="stable")
    weights = np.exp((row[order].astype(np.float64) - row.max()) / params.temperature)
    weights[params.top_k or len(row) :] = 0
    shares = weights / weights.sum()
    if params.top_p < 1:
        weights[np.cumsum(shares) - shares >= params.top_p] = 0
    weights[weights < params.min_p * weights[0]] = 0
    probabilities = np.empty(len(row))
    probabilities[order] = weights / weights.sum()
    return probabilities


def _critical(degrees: int) -> float:
    """What chi-square exceeds once in a thousand experiments, by the approximation of Wilson and Hilferty."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 3.09 * part**0.5) ** 3)


def test_rows_that_cannot_be_drawn_from_are_told() -> None:
    import mlx.core as mx

    from enginehouse_mlx.sampling import draw_rows

    rows = np.random.default_rng(0).normal(size=(8, 700)).astype(np.float32)
    for start in (0, 4):
        rows[start, 3], rows[start + 1, 3], rows[start + 2] = np.nan, np.inf, -np.inf
    params = [SamplingParams(temperature=float(i < 4)) for i in range(8)]
    tokens = draw_rows(mx.array(rows), _draws(params, 0)).tolist()

    assert [token < 0 for token in tokens] == [True, True, True, False] * 2


def test_a_token_that_nobody_has_read_is_the_next_input(llama: Any) -> None:
    """The next pass gives the logits that it would give if the drawn token were passed in."""
    prompt = prompts_of(llama)[0]
    late, early = llama.open_sequence(), llama.open_sequence()
    output = llama.forward([Span(late, 0, np.array(prompt, np.int32))])
    drawn = llama.sample(output, [Draw(row=0, sequence=late, sampling=SamplingParams(temperature=0.0), number=0.0)])
    unread = llama.forward([Span(late, len(prompt), LastSampled())]).host().copy()
    token_id = drawn.host()[0].token_id
    read = llama.forward([Span(early, 0, np.array([*prompt, token_id], np.int32))]).host()

    assert np.abs(unread - read).max() < 1e-3
    assert llama.length(late) == len(prompt) + 1
    with pytest.raises(InvalidSpan, match="no token was drawn"):
        llama.forward([Span(early, len(prompt) + 1, LastSampled())])
    llama.free_sequence(late)
    llama.free_sequence(early)
    assert llama.open_sequence() == late
    with pytest.raises(InvalidSpan, match="no token was drawn"):
        llama.forward([Span(late, 0, LastSampled())])
    llama.free_sequence(late)
