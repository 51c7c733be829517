"""Tiny random models whose sequences carry a state: LFM2 (short convolutions), Qwen3.5 (gated delta net) and Mamba."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import write_gguf

from .gguf import tiny_values

KINDS = ("lfm2", "qwen35", "mamba")

_WIDTH, _INNER, _HEAD = 64, 96, 16
_STATE, _VALUE_HEADS, _KEY_HEADS = 16, 4, 2
_NUM_LAYERS = 4
_ATTENTION = {"lfm2": (1, 3), "qwen35": (3,), "mamba": ()}  # layers with keys and values

Shapes = dict[str, tuple[int, ...]]


def write_hybrid(folder: Path, kind: str, **more: Any) -> Path:
    """Write a model of a kind; keyword names are metadata, see :func:`.gguf.tiny_values`."""
    values = {key.replace("llama.", f"{kind}.", 1): item for key, item in tiny_values().items()}
    values = {key: item for key, item in values.items() if not key.startswith("tokenizer.ggml.model")}
    values |= {"general.architecture": kind, "tokenizer.ggml.model": "llama"}
    sizes: dict[str, Any] = {"block_count": _NUM_LAYERS, "embedding_length": _WIDTH, "feed_forward_length": _INNER}
    heads = [4 if layer in _ATTENTION[kind] else 0 for layer in range(_NUM_LAYERS)]
    if kind == "lfm2":
        sizes |= {"shortconv.l_cache": 3, "attention.head_count_kv": heads, "rope.dimension_count": _HEAD}
    elif kind == "qwen35":
        sizes |= {"ssm.conv_kernel": 4, "ssm.inner_size": _STATE * _VALUE_HEADS, "ssm.state_size": _STATE}
        sizes |= {"ssm.time_step_rank": _VALUE_HEADS, "ssm.group_count": _KEY_HEADS, "attention.head_count_kv": 4}
        sizes |= {"attention.key_length": _HEAD, "attention.value_length": _HEAD, "rope.dimension_count": _HEAD}
        sizes |= {"rope.dimension_sections": [3, 3, 2, 0]}
    else:
        sizes |= {"ssm.conv_kernel": 4, "ssm.inner_size": 2 * _WIDTH, "ssm.state_size": _STATE}
        sizes |= {"ssm.time_step_rank": 8, "attention.head_count": 0, "attention.head_count_kv": 0}
    values |= {f"{kind}.{key}": item for key, item in sizes.items()}
    values |= {key.replace("__", "."): item for key, item in more.items()}
    return write_gguf(folder / f"{kind}.gguf", values, _tensors(kind, len(values["tokenizer.ggml.tokens"])))


def _tensors(kind: str, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    last_norm = "token_embd_norm" if kind == "lfm2" else "output_norm"
    shapes: Shapes = {"token_embd.weight": (vocab_size, _WIDTH), f"{last_norm}.weight": (_WIDTH,)}
    for layer in range(_NUM_LAYERS):
        layer_shapes = {"lfm2": _lfm2, "qwen35": _qwen35, "mamba": _mamba}[kind](layer in _ATTENTION[kind])
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    rng = np.random.default_rng(5)
    return {name: _values(rng, name, shape) for name, shape in shapes.items()}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):  # decay: negative
        return -np.abs(rng.standard_normal(shape)).astype(np.float32) - 0.1
    scale = 0.2 if "token_embd" in name else 1.0 if len(shape) == 1 else shape[-1] ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _mlp() -> Shapes:
    return {
        "ffn_gate.weight": (_INNER, _WIDTH),
        "ffn_up.weight": (_INNER, _WIDTH),
        "ffn_down.weight": (_WIDTH, _INNER),
        "attn_norm.weight": (_WIDTH,),
    }


def _attention(gate: int = 1) -> Shapes:
    return {
        "attn_q.weight": (gate * _WIDTH, _WIDTH),
        "attn_k.weight": (_WIDTH, _WIDTH),
        "attn_v.weight": (_WIDTH, _WIDTH),
        "attn_output.weight": (_WIDTH, _WIDTH),
        "attn_q_norm.weight": (_HEAD,),
        "attn_k_norm.weight": (_HEAD,),
    }


def _lfm2(has_attention: bool) -> Shapes:
    shapes = {**_mlp(), "ffn_norm.weight": (_WIDTH,)}
    if has_attention:
        return shapes | _attention()
    return shapes | {
        "shortconv.conv.weight": (_WIDTH, 3),
        "shortconv.in_proj.weight": (3 * _WIDTH, _WIDTH),
        "shortconv.out_proj.weight": (_WIDTH, _WIDTH),
    }


def _qwen35(has_attention: bool) -> Shapes:
    shapes = {**_mlp(), "post_attention_norm.weight": (_WIDTH,)}
    if has_attention:
        return shapes | _attention(gate=2)
    keys, values = _STATE * _KEY_HEADS, _STATE * _VALUE_HEADS
    return shapes | {
        "attn_qkv.weight": (2 * keys + values, _WIDTH),
        "attn_gate.weight": (values, _WIDTH),
        "ssm_conv1d.weight": (2 * keys + values, 4),
        "ssm_dt.bias": (_VALUE_HEADS,),
        "ssm_a": (_VALUE_HEADS,),
        "ssm_beta.weight": (_VALUE_HEADS, _WIDTH),
        "ssm_alpha.weight": (_VALUE_HEADS, _WIDTH),
        "ssm_norm.weight": (_STATE,),
        "ssm_out.weight": (_WIDTH, values),
    }


def _mamba(has_attention: bool) -> Shapes:
    inner, rank = 2 * _WIDTH, 8
    return {
        "attn_norm.weight": (_WIDTH,),
        "ssm_in.weight": (2 * inner, _WIDTH),
        "ssm_conv1d.weight": (inner, 4),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * _STATE, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, _STATE),
        "ssm_d": (inner,),
        "ssm_out.weight": (_WIDTH, inner),
    }
