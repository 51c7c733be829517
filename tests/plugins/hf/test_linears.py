"""Linear layers with weights in the order of oneDNN's kernels: their products, and the models that have them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from enginehouse.contract.backend import ModelSource, Span
from enginehouse_hf import loader
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.linears import PreparedLinear, is_supported, prepare_linears, restore

from .lora_folders import lora_tensors, write_adapter

pytestmark = [pytest.mark.hf, pytest.mark.skipif(not is_supported(), reason="this build of torch lacks oneDNN")]

_PROMPTS = [np.arange(first, first + 9, dtype=np.int32) for first in (5, 20, 35, 50)]


def _open(path: Path, **options: Any) -> Any:
    options = {"device": "cpu", "context": 64, "slots": 4, "threads": 1, **options}
    return HfBackend().open(ModelSource(str(path), path), HfOptions(**options), lambda _share, _what: None)


def _logits(runner: Any, adapter: tuple[tuple[int, float], ...] = ()) -> NDArray[np.float32]:
    spans = [Span(runner.open_sequence(), 0, prompt, "all", adapter=adapter) for prompt in _PROMPTS]
    rows: NDArray[np.float32] = runner.forward(spans).host().copy()
    for span in spans:
        runner.free_sequence(span.sequence)
    return rows


def _keep_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "prepare_linears", lambda *_modules, **_only: [])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1536, 576), (64, 7), (5, 3), (1, 1)])
def test_products_are_those_of_the_layer_that_was_replaced(inputs: int, outputs: int, bias: bool) -> None:
    """For any number of rows, none and rows that are not next to each other included; the weights come back."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    prepared = PreparedLinear(linear)
    rows = [torch.randn(*shape, inputs) for shape in ((), (0,), (1, 0), (1,), (1, 1), (8,), (2, 33))]
    with torch.inference_mode():
        for x in (*rows, torch.randn(inputs, 12).t()):
            torch.testing.assert_close(prepared(x), linear(x), rtol=1e-5, atol=1e-5)
        plain = prepared.plain()

    assert torch.equal(plain.weight, linear.weight)
    assert (plain.bias is None and linear.bias is None) or torch.equal(plain.bias, linear.bias)


class _Subclass(nn.Linear):
    pass


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = self.again = nn.Linear(4, 4)
        self.half = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.nowhere = nn.Linear(4, 4, device="meta")
        self.other = _Subclass(4, 4)
        self.excluded = nn.Sequential(nn.Linear(4, 4))
        self.embedding = nn.Embedding(4, 4)


def test_layers_of_other_types_stay_as_they_are() -> None:
    """A layer with two names stays one layer, and all come back as they were."""
    model = _Model()
    before, weight = dict(model.named_modules()), model.plain.weight
    replaced = prepare_linears(model, [model.excluded])
    changed = {name for name, module in model.named_modules() if before[name] is not module}

    assert changed == {"plain"}  # named_modules names a module once
    assert isinstance(model.plain, PreparedLinear)
    assert model.again is model.plain

    restore(replaced)
    assert type(model.plain) is nn.Linear
    assert model.again is model.plain
    assert torch.equal(model.plain.weight, weight)


def test_only_one_layer_can_be_chosen() -> None:
    model = _Model()
    prepare_linears(model, only=model.excluded[0])

    assert isinstance(model.excluded[0], PreparedLinear)
    assert type(model.plain) is nn.Linear


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_are_those_of_plain_layers(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter and without, and the metadata says which layers compute."""
    path = tiny_model(kind)
    adapter = write_adapter(tmp_path / "adapter", lora_tensors(path, 1))

    def results() -> tuple[str, NDArray[np.float32], NDArray[np.float32]]:
        runner = _open(path)
        handle = runner.load_adapter(adapter)
        found = runner.info.metadata["layers"], _logits(runner), _logits(runner, ((handle, 1.0),))
        runner.close()
        return found

    layers, base, adapted = results()
    _keep_plain(monkeypatch)
    plain_layers, plain_base, plain_adapted = results()

    assert layers == f"{plain_layers}, products by oneDNN"
    assert np.abs(base - plain_base).max() < 1e-4 * np.abs(plain_base).max()
    assert np.abs(adapted - plain_adapted).max() < 1e-4 * np.abs(plain_adapted).max()
    assert np.abs(adapted - base).max() > 0.1


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"device_map": "cpu"}], ids=["bfloat16", "spread"])
def test_other_models_have_plain_layers(tiny_model: Callable[[str], Path], options: dict[str, Any]) -> None:
    runner = _open(tiny_model("llama"), **options)

    assert "oneDNN" not in runner.info.metadata["layers"]


@pytest.mark.parametrize("fault", ["reads weights", "wrong numbers"])
def test_a_model_that_cannot_have_them_is_served_with_plain_layers(
    fault: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = PreparedLinear.forward

    def broken(self: PreparedLinear, rows: Tensor) -> Tensor:
        return forward(self, rows.to(self.weight.dtype)) if fault == "reads weights" else 1.1 * forward(self, rows)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(PreparedLinear, "forward", broken)
        runner = _open(tiny_model("llama"))
    layers, rows = runner.info.metadata["layers"], _logits(runner)
    runner.close()
    _keep_plain(monkeypatch)
    plain = _open(tiny_model("llama"))

    assert "oneDNN" not in layers
    assert "oneDNN's layers are not used" in caplog.text
    assert np.array_equal(rows, _logits(plain))
