"""Spans that run only the first layers: logits of the shorter model, and nothing reads what was never written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.backend import Draw, LastSampled, ModelSource, Span
from enginehouse.drafting import BoundDrafter, DraftContext
from enginehouse.engine.loop import StepEngine
from enginehouse.errors import InvalidSpan
from enginehouse.types import EngineRequest, EngineSettings, RequestFinished, SamplingParams, StopParams, TextDelta
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.depth import find_layers
from enginehouse_mlx.halves import cut_model
from enginehouse_speculate.layers import LayersDrafter, LayersOptions

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

RandomModel = Callable[..., Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 90


def _open(path: Path, **options: Any) -> Any:
    settings = MlxOptions(slots=4, context=128, **options)
    return MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _reference(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Logits of every token, by mlx-lm alone."""
    import mlx.core as mx
    from mlx_lm import load

    model = load(str(folder))[0]
    return np.asarray(model(mx.array(token_ids[None]))[0])


def _append(runner: Any, sequence: int, token_ids: np.ndarray, num_layers: int | None = None) -> np.ndarray:
    span = Span(sequence, runner.length(sequence), token_ids, "all", num_layers)
    rows: np.ndarray = runner.forward([span]).host().copy()
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3_moe", "gpt_neox"])
def test_fewer_layers_are_the_shorter_model(random_model: RandomModel, name: str) -> None:
    """In one span, and in chunks and single tokens; whether the vocabulary projection could be cut off or not."""
    runner = _open(random_model(name))
    assert runner.capabilities.exit_layers == (1, 2, 3)
    needs_three = name in ("llama", "gemma3_text")  # mlx-lm opens no model of windows only
    for num_layers in (3,) if needs_three else (1, 3):
        kinds = {"layer_types": _kinds(num_layers)} if name == "llama" else {}
        expected = _reference(random_model(name, num_hidden_layers=num_layers, **kinds), _TOKENS)
        whole, parts = runner.open_sequence(), runner.open_sequence()
        found = _append(runner, whole, _TOKENS, num_layers)
        pieces = np.split(_TOKENS, [20, 37, 38, 39])
        found_in_parts = np.concatenate([_append(runner, parts, piece, num_layers) for piece in pieces])

        assert np.abs(found - expected).max() < 1e-3
        assert np.abs(found_in_parts - expected).max() < 1e-3
        assert np.abs(expected).max() > 1
        runner.free_sequence(whole)
        runner.free_sequence(parts)
    runner.close()


def _kinds(num_layers: int) -> list[str]:
    return ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"][:num_layers]


def test_drafts_are_taken_back_before_all_layers_run(random_model: RandomModel) -> None:
    """Self-drafting: the draft shares the memory of the text before it; verified, logits are those of a plain pass."""
    runner = _open(random_model("gemma3_text"))
    plain, drafted = runner.open_sequence(), runner.open_sequence()
    expected = _append(runner, plain, _TOKENS)
    _append(runner, drafted, _TOKENS[:30])
    for place in range(30, 34):
        _append(runner, drafted, _TOKENS[place : place + 1], 2)
    _append(runner, drafted, _TOKENS[34:35], 1)
    for num_layers in (None, 3, 2):
        with pytest.raises(InvalidSpan, match="fewer layers"):
            _append(runner, drafted, _TOKENS[35:], num_layers)
    fork, kept = runner.fork(drafted, 33)
    with pytest.raises(InvalidSpan, match="fewer layers"):
        _append(runner, fork, _TOKENS[kept:])

    assert runner.truncate(fork, 30) == runner.truncate(drafted, 30) == 30
    assert np.abs(_append(runner, drafted, _TOKENS[30:]) - expected[30:]).max() < 1e-3
    assert np.abs(_append(runner, fork, _TOKENS[30:]) - expected[30:]).max() < 1e-3
    runner.close()


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


def test_one_pass_may_run_different_numbers_of_layers(random_model: RandomModel) -> None:
    runner = _open(random_model("gemma3_text"))
    wanted: list[int | None] = [None, 2, None, 1]
    sizes = [7, 1, 1, 5]
    outputs: list[Any] = ["last", "last", "all", "all"]
    sequences = [runner.open_sequence() for _ in wanted]
    alone = []
    for sequence, size, rows, num_layers in zip(sequences, sizes, outputs, wanted, strict=True):
        runner.forward([Span(sequence, 0, _TOKENS[:9], "none")])
        span = Span(sequence, 9, _TOKENS[9 : 9 + size], rows, num_layers)
        alone.append(runner.forward([span]).host().copy())
        runner.truncate(sequence, 9)
    spans = [
        Span(sequence, 9, _TOKENS[9 : 9 + size], rows, num_layers)
        for sequence, size, rows, num_layers in zip(sequences, sizes, outputs, wanted, strict=True)
    ]
    together = runner.forward(spans).host()

    assert together.shape[0] == 1 + 1 + 1 + 5
    assert np.abs(together - np.concatenate(alone)).max() < 1e-3
    runner.close()


def test_drafts_follow_what_the_device_drew(random_model: RandomModel) -> None:
    """Greedy drafts, each token drawn by MLX and used by the next span without a look at it."""
    runner = _open(random_model("qwen3"), draws="mlx")
    drafted, checked = runner.open_sequence(), runner.open_sequence()
    sampling, tokens = SamplingParams(temperature=0.0), []
    output = runner.forward([Span(drafted, 0, _TOKENS[:9], "last", 2)])
    for step in range(5):
        drawn = runner.sample(output, [Draw(row=0, sequence=drafted, sampling=sampling, number=0.0)])
        output = runner.forward([Span(drafted, 9 + step, LastSampled(), "last", 2)])
        tokens.append(drawn.host()[0].token_id)
    text = np.concatenate([_TOKENS[:9], np.array(tokens, np.int32)])

    assert tokens == _append(runner, checked, text, 2)[8:-1].argmax(1).tolist()
    runner.close()


def test_layers_that_are_not_there_are_refused(random_model: RandomModel) -> None:
    runner = _open(random_model("qwen3"))
    sequence = runner.open_sequence()
    for num_layers in (0, 4, 9):
        with pytest.raises(InvalidSpan, match=f"num_layers={num_layers} is not supported"):
            _append(runner, sequence, _TOKENS[:3], num_layers)
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
                    num_drafted += event.num_drafted_tokens
                    num_accepted += event.num_accepted_tokens
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
