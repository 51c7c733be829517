"""Float32 weights on a CPU are stored by input, with the values and results of mlx-lm's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.layout import lay_out_by_input

pytestmark = pytest.mark.mlx

TinyModel = Callable[[str], Path]


@pytest.fixture(autouse=True)
def cpu_only() -> None:
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("weights are laid out again on a CPU only")


def _load(folder: Path) -> Any:
    from mlx_lm import load

    return load(str(folder))[0]


def _is_by_input(weight: Any) -> bool:
    return bool(np.asarray(weight).flags.f_contiguous)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the second uses its embedding as projection
def test_weights_by_input_give_the_same_logits(tiny_model: TinyModel, architecture: str) -> None:
    import mlx.core as mx

    before, after = _load(tiny_model(architecture)), _load(tiny_model(architecture))
    lay_out_by_input(after)
    token_ids = mx.array([[5, 17, 3, 60, 2]])

    for num_tokens in (1, 5):
        expected, actual = (np.asarray(model(token_ids[:, :num_tokens])) for model in (before, after))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_opened_model_has_float32_weights_by_input(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    source = ModelSource(str(folder), folder)
    runner: Any = MlxBackend().open(source, MlxOptions(slots=1, context=64), lambda _share, _what: None)
    model = runner.model.model
    layer = model.layers[0]

    assert _is_by_input(layer.self_attn.q_proj.weight)
    assert _is_by_input(layer.mlp.down_proj.weight)
    assert _is_by_input(model.model.embed_tokens.weight)
    runner.close()


def test_16_bit_weights_keep_their_layout(tiny_model: TinyModel) -> None:
    import mlx.core as mx

    model = _load(tiny_model("qwen3"))
    model.set_dtype(mx.float16)
    lay_out_by_input(model)

    assert not _is_by_input(model.layers[0].mlp.down_proj.weight)
