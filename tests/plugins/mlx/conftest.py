"""Tiny models of many architectures, made by mlx-lm. Nothing here is collected without the ``mlx`` extra."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

collect_ignore_glob = [] if find_spec("mlx") and find_spec("mlx_lm") else ["test_*.py"]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 16}
_LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_DELTA_NET: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.001, 100.0],
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "sliding_window": 8, "layer_types": _LAYER_TYPES},
    "qwen3": {**_SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        **_SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **_SIZES,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 500.0,
    },
    "phi3": {**_SIZES, "rope_scaling": None},
    "olmo2": {**_SIZES, "attention_bias": False},
    "qwen3_moe": {
        **_SIZES,
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        **_SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_SIZES,
        **_EXPERTS,
        **_DELTA_NET,
        "partial_rotary_factor": 0.5,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "qwen3_5": {
        **_SIZES,
        **_DELTA_NET,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mamba2": {**_SIZES, **_MAMBA2, "num_heads": 8, "head_dim": 16, "state_size": 8, "time_step_rank": "auto"},
    "lfm2": {
        **_SIZES,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "jamba": {
        **_SIZES,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        **_SIZES,
        **_MAMBA2,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "hybrid_override_pattern": ["M", "-", "*", "M"],
    },
    "granitemoehybrid": {
        **_SIZES,
        "attention_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "nope",
        "time_step_limit": [0.001, 100.0],
    },
    "falcon_h1": {
        **_SIZES,
        "head_dim": 16,
        "attention_bias": False,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
    },
    "gpt_neox": {**_SIZES, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
}


@pytest.fixture(scope="session")
def random_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a model type of mlx-lm, and changes of its configuration, to a folder with a tiny random model.

    A model with fewer layers has the weights of the first ones.
    """
    folders: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        key = f"{name} {changes}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(name) / name
            _write_model({"model_type": name, **_CONFIGS[name], **changes}, tiny_model("llama"), folders[key])
        return folders[key]

    return make


def _write_model(config: dict[str, Any], tokenizer: Path, folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config["vocab_size"] = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    classes = import_module(f"mlx_lm.models.{config['model_type']}")
    weights: dict[str, Any] = dict(tree_flatten(classes.Model(classes.ModelArgs.from_dict(config)).parameters()))
    for name, weight in weights.items():
        if weight.ndim > 1 or name.endswith(
            ("bias", "sinks")
        ):  # drawn by name, so that a shorter model has the same ones
            weights[name] = 0.2 * mx.random.normal(weight.shape, key=mx.random.key(crc32(name.encode())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
