"""Model folders of well-known sizes without weights, for measuring on machines that have no downloads.

``random_weights`` draws the weights when such a folder is opened, and :func:`write_mxfp4` writes random codes; how fast
a model runs does not depend on them. The tokenizer has as many tokens as the model, all of them short
words, so that text is made as from a real one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["SHAPES", "write_mxfp4", "write_shape"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "dtype": "bfloat16",
    },
    "hybrid-2b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}
"""Configurations by name, as the models' own ``config.json`` has them; hybrids are of Qwen 3.5's kind."""

SHAPES["hybrid-9b"] = {
    **SHAPES["hybrid-2b"],
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
}


def write_shape(name: str, folder: Path) -> Path:
    """A folder with the configuration of ``name`` and a tokenizer; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def write_mxfp4(folder: Path) -> None:
    """Write random weights of gpt-oss to a folder of :func:`write_shape`: experts in MXFP4, a file for each layer."""
    c = json.loads((folder / "config.json").read_text())
    hidden, width, experts, dim = c["hidden_size"], c["intermediate_size"], c["num_local_experts"], c["head_dim"]
    num_query, num_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02).cpu()

    def codes(lowest: int, highest: int, *shape: int) -> Tensor:
        return torch.randint(lowest, highest + 1, shape, dtype=torch.uint8, device="cuda").cpu()

    places: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
        places.update(dict.fromkeys(tensors, f"{name}.safetensors"))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    shape = c["vocab_size"], hidden
    save(
        "ends",
        {"model.embed_tokens.weight": normal(*shape), "lm_head.weight": normal(*shape), "model.norm.weight": ones},
    )
    for index in range(c["num_hidden_layers"]):
        tensors = {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones.clone()}
        for name, rows, columns in (
            ("q", num_query, hidden), ("k", num_kv, hidden), ("v", num_kv, hidden), ("o", hidden, num_query),
        ):  # fmt: skip
            tensors |= {
                f"self_attn.{name}_proj.weight": normal(rows, columns),
                f"self_attn.{name}_proj.bias": normal(rows),
            }
        tensors["self_attn.sinks"] = normal(c["num_attention_heads"])
        tensors |= {"mlp.router.weight": normal(experts, hidden), "mlp.router.bias": normal(experts)}
        for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            tensors[f"mlp.experts.{name}_blocks"] = codes(0, 255, experts, rows, columns // 32, 16)
            tensors[f"mlp.experts.{name}_scales"] = codes(118, 122, experts, rows, columns // 32)
            tensors[f"mlp.experts.{name}_bias"] = normal(experts, rows)
        save(f"layer-{index}", {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level, without merges: text is encoded byte by byte, and every id decodes to a byte or a word."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
    words = [f"Ġ{_word(number)}" for number in range(vocab_size - len(alphabet))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: place for place, token in enumerate([*alphabet, *words])},
            "merges": [],
        },
    }


def _word(number: int) -> str:
    letters = ""
    while True:
        number, letter = divmod(number, 26)
        letters += chr(97 + letter)
        if not number:
            return letters
