"""Spans that run only the first layers: logits of the shorter model, and nothing reads what was never written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.backend import Draw, LastSampled, ModelSource, Span
from enginehouse.errors import InvalidSpan
from enginehouse.types import SamplingParams
from enginehouse_hf.backend import HfBackend, HfOptions

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

RandomModel = Callable[[str], Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 150


def _open(path: Path, **options: Any) -> Any:
    settings = HfOptions(dtype="float32", threads=1, slots=4, context=128, **options)
    return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _shortened(folder: Path, target: Path, num_layers: int) -> Path:
    """The same weights under a configuration with fewer layers."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config))
    return target


def _reference(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        rows: np.ndarray = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0].numpy()
    return rows


def _append(runner: Any, sequence: int, token_ids: np.ndarray, num_layers: int | None = None) -> np.ndarray:
    span = Span(sequence, runner.length(sequence), token_ids, "all", num_layers)
    rows: np.ndarray = runner.forward([span]).host().copy()
    return rows


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "phi", "qwen3_moe"])
def test_fewer_layers_are_the_shorter_model(
    random_model: RandomModel, tmp_path: Path, name: str, way: dict[str, Any]
) -> None:
    """In one span, and in chunks and single tokens; each number of layers that is offered."""
    folder = random_model(name)
    runner = _open(folder, **way)
    assert runner.capabilities.exit_layers == (1, 2, 3)
    for num_layers in (1, 3):
        expected = _reference(_shortened(folder, tmp_path / str(num_layers), num_layers), _TOKENS)
        whole, parts = runner.open_sequence(), runner.open_sequence()
        found = _append(runner, whole, _TOKENS, num_layers)
        pieces = np.split(_TOKENS, [20, 37, 38, 39])
        found_in_parts = np.concatenate([_append(runner, parts, piece, num_layers) for piece in pieces])

        assert np.abs(found - expected).max() < 1e-3
        assert np.abs(found_in_parts - expected).max() < 1e-3
    runner.close()


def test_drafts_are_taken_back_before_all_layers_run(random_model: RandomModel, way: dict[str, Any]) -> None:
    """Self-drafting: the draft shares the memory of the text before it; verified, logits are those of a plain pass."""
    runner = _open(random_model("qwen3"), **way)
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


def test_one_pass_may_run_different_numbers_of_layers(random_model: RandomModel, way: dict[str, Any]) -> None:
    runner = _open(random_model("mistral"), **way)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drafts_follow_what_the_device_drew(random_model: RandomModel) -> None:
    """Greedy drafts, each token drawn on the device and used by the next span without a look at it."""
    runner = _open(random_model("qwen3"), device="cuda:0", cache_tokens=2048)
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
    runner = _open(random_model("qwen3"), device="cpu")
    sequence = runner.open_sequence()
    for num_layers in (0, 4, 9):
        with pytest.raises(InvalidSpan, match=f"num_layers={num_layers} is not supported"):
            _append(runner, sequence, _TOKENS[:3], num_layers)
    runner.close()
