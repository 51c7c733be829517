"""GGUF files of the shape of a real Llama with random weights, for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import write_gguf

__all__ = ["write_gguf_model"]


def write_gguf_model(config: Mapping[str, Any], path: Path) -> Path:
    """Write a Llama with tied embeddings, its matrices in ``Q8_0``; every layer has the same weights.

    Args:
        config: as in a ``config.json``.
        path: overwritten if it exists.
    """
    tensors = _tensors(config)
    return write_gguf(path, _values(config), tensors, {name: "q8_0" for name, data in tensors.items() if data.ndim > 1})


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    special, num_bytes = ["<unk>", "<s>", "</s>"], 256
    num_others = config["vocab_size"] - len(special) - num_bytes
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
    }
    tokenizer = {
        "model": "llama",
        "tokens": [*special, *(f"<0x{byte:02X}>" for byte in range(num_bytes)), *(f"t{n}" for n in range(num_others))],
        "scores": [0.0] * config["vocab_size"],
        "token_type": np.array([2, 3, 3, *[6] * num_bytes, *[1] * num_others], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
    }


def _tensors(config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    width, inner, rng = config["hidden_size"], config["intermediate_size"], np.random.default_rng(0)
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "attn_q": (width, width),
        "attn_k": (kv_width, width),
        "attn_v": (kv_width, width),
        "attn_output": (width, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    layer = {name: rng.standard_normal(shape, np.float32) / 50 for name, shape in shapes.items()}
    layer |= {"attn_norm": np.ones(width, np.float32), "ffn_norm": np.ones(width, np.float32)}
    embeddings = rng.standard_normal((config["vocab_size"], width), np.float32) / 50
    return {
        "token_embd.weight": embeddings,
        "output_norm.weight": np.ones(width, np.float32),
        **{f"blk.{n}.{name}.weight": data for n in range(config["num_hidden_layers"]) for name, data in layer.items()},
    }
