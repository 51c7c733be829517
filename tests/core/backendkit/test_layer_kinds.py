"""Kinds of layers are counted from the keys of published configurations, old and new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.model_folder import ModelFolder

_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_DELTA_SIZE = 4 * 8 * 16 + (2 * 2 * 16 + 4 * 8) * 4
_MAMBA = {"mamba_expand": 2, "mamba_d_state": 8, "mamba_d_conv": 4}
_MAMBA_SIZE = 128 * 8 + 128 * 4
_OWN_WIDTH_SIZE = 96 * 8 + 96 * 4
_NEMOTRON = {"hybrid_override_pattern": "M-M*-", "ssm_state_size": 8}


@pytest.mark.parametrize(
    ("config", "num_attention", "num_recurrent", "size"),
    [
        ({"num_hidden_layers": 3}, 3, 0, 0),
        ({"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, 4, 0, 0),
        ({**_DELTA, "num_hidden_layers": 8, "full_attention_interval": 4}, 2, 6, _DELTA_SIZE),
        ({**_DELTA, "layer_types": ["linear_attention", "full_attention"]}, 1, 1, _DELTA_SIZE),
        ({"num_hidden_layers": 4, "full_attn_idxs": [1], "conv_L_cache": 3}, 1, 3, 64 * 3),
        ({**_MAMBA, "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4}, 1, 7, _MAMBA_SIZE),
        ({**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2]}, 1, 3, _MAMBA_SIZE),
        ({**_MAMBA, "layers_block_type": ["mamba", "hybrid", "mamba"]}, 1, 3, _MAMBA_SIZE),
        ({**_MAMBA, "num_hidden_layers": 2, "mamba_n_groups": 2}, 2, 2, _MAMBA_SIZE + 2 * 2 * 8 * 4),
        ({**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 96}, 2, 2, _OWN_WIDTH_SIZE),
        ({**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": None}, 2, 2, _MAMBA_SIZE),
        ({**_NEMOTRON, "expand": 2}, 1, 2, _MAMBA_SIZE),
        ({**_NEMOTRON, "expand": 2, "mamba_num_heads": 6, "mamba_head_dim": 16}, 1, 2, _OWN_WIDTH_SIZE),
    ],
    ids=[
        "plain",
        "windows",
        "qwen3-next",
        "qwen3.5",
        "lfm2",
        "jamba",
        "bamba",
        "zamba2",
        "falcon-h1",
        "falcon-h1 of its own width",
        "falcon-h1 of the usual width",
        "nemotron-h",
        "nemotron-h of its own width",
    ],
)
def test_an_estimate_counts_each_kind(
    config: dict[str, Any], num_attention: int, num_recurrent: int, size: int, tmp_path: Path
) -> None:
    folder = ModelFolder(tmp_path, {**_HEADS, **config})
    none, three = folder.estimate(10, "float32", 0), folder.estimate(10, "float32", 3)

    assert none.kv_bytes_per_token == 2 * num_attention * 2 * 16 * 4
    assert three.total_bytes - none.total_bytes == 3 * num_recurrent * size * 4


def test_a_model_without_attention_needs_no_keys(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 16}

    assert ModelFolder(tmp_path, config).estimate(10, "float32").kv_bytes_per_token == 0


@pytest.mark.parametrize(
    "wrong", [{"attn_layer_period": "8"}, {"mamba_d_state": -1}, {"mamba_expand": []}, {"mamba_d_ssm": "96"}], ids=str
)
def test_a_wrong_size_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, {**_HEADS, **_MAMBA, "num_hidden_layers": 8, **wrong})
    with pytest.raises(ModelLoadError, match="invalid size"):
        folder.estimate(10, "float32", 1)
