"""Spans that run only the first layers: logits of the shorter model, and nothing reads what was never written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.drafter import BoundDrafter, DraftContext
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.depth import find_layers
from enginehouse_mlx.halves import cut_model
from enginehouse_speculate.layers import LayersDrafter, LayersOptions
from enginehouse_testkit.depth_contract import DepthContract, FewerLayers, OpenFamily

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

RandomModel = Callable[..., Path]

_LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 90


def _open(path: Path, **options: Any) -> Any:
    settings = MlxOptions(slots=4, context=128, **options)
    return MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _append(runner: Any, sequence: int, token_ids: np.ndarray, num_layers: int | None = None) -> np.ndarray:
    span = Span(sequence, runner.length(sequence), token_ids, "all", num_layers)
    rows: np.ndarray = runner.forward([span]).host().copy()
    return rows


class TestDepth(DepthContract):
    """Against mlx-lm alone. Models whose vocabulary projection could be cut off, and one whose could not."""

    @pytest.fixture(params=["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3_moe", "gpt_neox"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def open_family(self, random_model: RandomModel) -> OpenFamily:
        return lambda family: _open(random_model(family))

    @pytest.fixture
    def open_drawing(self, random_model: RandomModel) -> OpenFamily:
        return lambda family: _open(random_model(family), draws="mlx")

    @pytest.fixture
    def logits_of_fewer(self, random_model: RandomModel) -> FewerLayers:
        import mlx.core as mx
        from mlx_lm import load

        def logits(family: str, num_layers: int, token_ids: np.ndarray) -> np.ndarray:
            kinds = {"layer_types": _LAYER_TYPES[:num_layers]} if family == "llama" else {}
            model = load(str(random_model(family, num_hidden_layers=num_layers, **kinds)))[0]
            return np.asarray(model(mx.array(token_ids[None]))[0])

        return logits

    def depths(self, family: str) -> Sequence[int]:
        return (3,) if family in ("llama", "gemma3_text") else (1, 3)  # mlx-lm opens no model of windows only


def test_drafts_may_outgrow_the_memory_of_the_layers_above(random_model: RandomModel) -> None:
    """Memory grows by blocks, layer by layer; a fork copies what is there."""
    runner = _open(random_model("qwen3"))
    tokens = np.tile(_TOKENS, 3)
    drafted, plain = runner.open_sequence(), runner.open_sequence()
    _append(runner, drafted, tokens[:100], 1)
    fork, kept = runner.fork(drafted, 90)
    assert kept == 90
    _append(runner, fork, tokens[90:110], 1)
    runner.truncate(drafted, 0)
    runner.truncate(fork, 0)
    expected = _append(runner, plain, tokens)

    assert np.abs(_append(runner, fork, tokens) - expected).max() < 1e-3
    assert np.abs(_append(runner, drafted, tokens) - expected).max() < 1e-3
    runner.close()


def test_a_model_that_goes_through_its_layers_in_another_way_offers_none(random_model: RandomModel) -> None:
    """Numbers decide: here the last layer runs before the others, so that fewer layers are not the beginning."""
    from mlx_lm import load

    model: Any = load(str(random_model("qwen3")))[0]
    own = type(model.model)

    class LastFirst(own):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: Any, cache: Any = None, *others: Any) -> Any:
            turned = copy.copy(self)
            turned.layers = [*self.layers[-1:], *self.layers[:-1]]
            return own.__call__(turned, inputs, [*cache[-1:], *cache[:-1]], *others)

    assert find_layers(model, cut_model(model)[0], SlotMemory(model)).exit_layers == (1, 2, 3)
    model.model.__class__ = LastFirst
    assert find_layers(model, cut_model(model)[0], SlotMemory(model)).exit_layers == ()


def _answers(runner: Any, drafters: Callable[[], dict[str, BoundDrafter]]) -> tuple[list[list[int]], int, int]:
    """Token ids of eight choices, and tokens drafted and right. Every pass of all layers takes a second."""
    seconds = [0.0]
    forward = runner.forward

    def timed(spans: Sequence[Span]) -> Any:
        seconds[0] += spans[0].num_layers is None
        return forward(spans)

    runner.forward = timed
    engine = StepEngine(runner, EngineSettings(slots=4), {}, clock=lambda: seconds[0], drafters=drafters())
    token_ids: dict[tuple[str, int], list[int]] = {}
    num_drafted = num_accepted = 0
    for number, (prompt, temperature) in enumerate(((_TOKENS[:9], 0.0), (_TOKENS[4:17], 0.7)) * 2):
        request = EngineRequest(
            request_id=str(number),
            sampling=SamplingParams(temperature=temperature, seed=number),
            stopping=StopParams(max_tokens=24, ignore_eos=True),
            num_choices=2,
        )
        engine.add(request, prompt.tolist())
        while engine.has_work() and number % 2:  # two requests at once
            for request_id, event in engine.step():
                if isinstance(event, TextDelta):
                    token_ids.setdefault((request_id, event.choice), []).extend(event.token_ids)
                elif isinstance(event, RequestFinished):
                    num_drafted += event.usage.drafted_tokens
                    num_accepted += event.usage.accepted_draft_tokens
    engine.close()
    return [token_ids[key] for key in sorted(token_ids)], num_drafted, num_accepted


@pytest.mark.parametrize("draws", ["core", "mlx"])
def test_the_drafter_layers_changes_no_token(random_model: RandomModel, draws: str) -> None:
    """Greedy and sampled, in batches, whoever draws; some drafts are right and most are wrong."""
    plain, num_drafted, _ = _answers(_open(random_model("gemma3_text"), draws=draws), dict)
    assert num_drafted == 0
    runner = _open(random_model("gemma3_text"), draws=draws)
    options = LayersOptions(num_layers=3, min_probability=0.0, max_tokens=3)
    drafted, num_drafted, num_accepted = _answers(
        runner, lambda: {"layers": LayersDrafter().bind(DraftContext(runner, 4, None), options)}
    )

    assert num_drafted > num_accepted > 0
    assert len(plain) == 8
    assert drafted == plain
