"""Tiny models with draft heads: random ones, and ones whose every token follows from the token before it.

In the latter, a *chain*, the model's layers change nothing, so that its last state is the last token's embedding and
the next token is a fixed one. A head that knows this is always right; one that knows less is right as often as stated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE = 64
VOCAB_SIZE = 400
FIRST = 10
QWEN_KINDS = ("qwen3_next", "qwen3_5_text")
MTP_KINDS = ("glm4_moe", "deepseek_v3", *QWEN_KINDS)
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {
        **_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "llama": {"num_key_value_heads": 2, "head_dim": 16},
    "glm4_moe": {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def write_model(kind: str, tokenizer: Path, folder: Path, *, num_layers: int = 3, is_chain: bool = False) -> Path:
    """A model with an MTP layer after its layers, if its kind has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = {"hidden_size": SIZE, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE}
    has_mtp = kind in MTP_KINDS
    config = AutoConfig.for_model(
        kind,
        **sizes,
        **_KINDS[kind],
        num_hidden_layers=num_layers + has_mtp,
        initializer_range=0.3,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and not is_chain:
            tensors[name] = tensor + 0.2 * torch.randn_like(tensor)
    if kind in QWEN_KINDS:
        tensors = _add_qwen_mtp(tensors, f"model.layers.{num_layers}.", is_chain)
        change(folder, layer_types=_DELTA["layer_types"][:num_layers])
    elif has_mtp:
        _add_mtp(tensors, f"model.layers.{num_layers}.", is_chain)
    if is_chain:
        _make_chain(tensors)
    save(tensors, folder)
    change(folder, num_hidden_layers=num_layers)
    return folder


def _add_qwen_mtp(tensors: dict[str, Tensor], prefix: str, is_chain: bool) -> dict[str, Tensor]:
    """Rename the last layer, and add what is around it; norms of these models are stored without the one."""
    renamed = {
        (f"mtp.layers.0.{name.removeprefix(prefix)}" if name.startswith(prefix) else name): tensor
        for name, tensor in tensors.items()
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        renamed[f"mtp.{name}.weight"] = torch.zeros(SIZE) if is_chain else 0.2 * torch.randn(SIZE)
    renamed["mtp.fc.weight"] = torch.eye(SIZE, 2 * SIZE) if is_chain else torch.randn(SIZE, 2 * SIZE) * 0.1
    return renamed


def with_mtp_as_layer(folder: Path, kind: str, whole: Path) -> tuple[Path, dict[str, Tensor]]:
    """A copy of a model whose MTP layer is its last one, and the weights around it, by DeepSeek's names."""
    shutil.copytree(folder, whole)
    tensors, prefix = load_file(folder / "model.safetensors"), "model.layers.3."
    if kind not in QWEN_KINDS:
        change(whole, num_hidden_layers=4)
        return whole, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    change(whole, num_hidden_layers=4, layer_types=_DELTA["layer_types"])
    save({name.replace("mtp.layers.0.", prefix): tensor for name, tensor in tensors.items()}, whole)
    names = {"norm": "shared_head.norm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    around = {f"{name}.weight": 1 + tensors[f"mtp.{own}.weight"] for own, name in names.items()}
    return whole, around | {"eh_proj.weight": tensors["mtp.fc.weight"]}


def _add_mtp(tensors: dict[str, Tensor], prefix: str, is_chain: bool) -> None:
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(SIZE) if is_chain else 1 + 0.2 * torch.randn(SIZE)
    joins = torch.randn(SIZE, 2 * SIZE) * 0.1
    tensors[f"{prefix}eh_proj.weight"] = torch.eye(SIZE, 2 * SIZE) if is_chain else joins
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def _make_chain(tensors: dict[str, Tensor]) -> None:
    """Every layer adds nothing; token ``t`` is followed by ``follower(t)``."""
    embeddings = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, SIZE), dim=-1)
    output = torch.zeros(VOCAB_SIZE, SIZE)
    ids = torch.arange(FIRST, VOCAB_SIZE)
    output[follower(ids)] = embeddings[ids]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] = torch.zeros_like(tensor)
        if name.endswith("embed_tokens.weight"):
            tensors[name] = embeddings.clone()
        if name.endswith("head.weight"):
            tensors[name] = output.clone()


def follower(token_ids: Any) -> Any:
    """The token after each token of a chain: a permutation of those from ``FIRST`` on, which end no text."""
    return FIRST + (token_ids - FIRST + 37) % (VOCAB_SIZE - FIRST)


def write_eagle3(folder: Path, *, is_chain: Path | None = None, reads_feature: bool = False, **changes: Any) -> Path:
    """An EAGLE-3 head with a part of the vocabulary.

    Args:
        is_chain: the folder of a chain; the head then knows what follows a token: of every token that it reads, or
            with ``reads_feature`` only from the model's states, so that its first token is right and the next is not.
        changes: settings of its ``config.json``.
    """
    folder.mkdir()
    draft_size = VOCAB_SIZE if is_chain else 150
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": draft_size,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": is_chain is not None,
        "norm_before_residual": is_chain is not None and not reads_feature,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    torch.manual_seed(1)
    tensors = {
        "fc.weight": torch.randn(SIZE, 3 * SIZE) * 0.1,
        "midlayer.self_attn.o_proj.weight": torch.randn(SIZE, SIZE) * 0.3,
        "midlayer.mlp.gate_proj.weight": torch.randn(96, SIZE) * 0.3,
        "midlayer.mlp.up_proj.weight": torch.randn(96, SIZE) * 0.3,
        "midlayer.mlp.down_proj.weight": torch.randn(SIZE, 96) * 0.3,
        "lm_head.weight": torch.randn(draft_size, SIZE),
        "d2t": torch.sort(torch.randperm(VOCAB_SIZE)[:draft_size]).values - torch.arange(draft_size),
        "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.2
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(SIZE)
    if is_chain is not None:
        _know_chain(tensors, load_file(is_chain / "model.safetensors"), reads_feature)
    save(tensors, folder)
    return folder


def _know_chain(tensors: dict[str, Tensor], model: dict[str, Tensor], reads_feature: bool) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith(("_proj.weight", "fc.weight")):
            tensors[name] = torch.zeros_like(tensor)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"midlayer.self_attn.{name}.bias"] = torch.zeros(SIZE)
    tensors["lm_head.weight"] = model["lm_head.weight"].clone()
    if reads_feature:  # the feature is the embedding of the token before the last: two steps lead from it to the next
        tensors["fc.weight"] = torch.eye(SIZE, 3 * SIZE)
        twice = torch.zeros(VOCAB_SIZE, SIZE)
        ids = torch.arange(FIRST, VOCAB_SIZE)
        twice[follower(follower(ids))] = model["model.embed_tokens.weight"][ids]
        tensors["lm_head.weight"] = twice
        return
    # Queries and keys are one constant, so that rotation makes a pair attend to itself; it passes on its embedding.
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(SIZE)
    tensors["midlayer.self_attn.q_proj.bias"] = torch.full((SIZE,), 30.0)
    tensors["midlayer.self_attn.k_proj.bias"] = torch.full((SIZE,), 30.0)
    tensors["midlayer.self_attn.v_proj.weight"] = torch.eye(SIZE, 2 * SIZE)
    tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(SIZE)


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write all tensors of a folder."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change(folder: Path, **settings: Any) -> None:
    """Change the configuration of a model or head."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
