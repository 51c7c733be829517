"""Small GGUF files: of one-dimensional tensors, and a tiny model that llama.cpp runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import write_gguf

_SPECIAL = ["<unk>", "<s>", "</s>"]
_VOCABULARY = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
_WIDTH, _INNER, _LAYERS = 32, 64, 2


def tiny_values(**more: Any) -> dict[str, Any]:
    """The metadata of a tiny llama with a sentencepiece vocabulary of bytes; keyword names have ``__`` for a dot."""
    sizes = {"block_count": _LAYERS, "context_length": 512, "embedding_length": _WIDTH, "feed_forward_length": _INNER}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8}
    types = np.array([2, 3, 3, *[6] * 256, *[1] * (len(_VOCABULARY) - 259)])
    tokenizer = {
        "model": "llama",
        "tokens": _VOCABULARY,
        "scores": [0.0] * len(_VOCABULARY),
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": item for key, item in {**sizes, **heads}.items()},
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **{f"tokenizer.ggml.{key}": item for key, item in tokenizer.items()},
        **{key.replace("__", "."): item for key, item in more.items()},
    }


def tiny_tensors() -> dict[str, NDArray[np.float32]]:
    """Random weights for :func:`tiny_values`."""
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(_VOCABULARY), _WIDTH), "output_norm": (_WIDTH,)}
    for layer in range(_LAYERS):
        kinds = {"attn_q": (_WIDTH, _WIDTH), "attn_k": (16, _WIDTH), "attn_v": (16, _WIDTH)}
        kinds |= {"attn_output": (_WIDTH, _WIDTH), "ffn_gate": (_INNER, _WIDTH), "ffn_up": (_INNER, _WIDTH)}
        kinds |= {"ffn_down": (_WIDTH, _INNER), "attn_norm": (_WIDTH,), "ffn_norm": (_WIDTH,)}
        shapes |= {f"blk.{layer}.{kind}": shape for kind, shape in kinds.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_parts(folder: Path, stem: str, num_parts: int, **more: Any) -> list[Path]:
    """The tiny model in several files."""
    tensors = list(tiny_tensors().items())
    written = []
    for index in range(num_parts):
        split = {"split.no": np.uint16(index), "split.count": np.uint16(num_parts)}
        split |= {"split.tensors.count": np.int32(len(tensors))}
        path = folder / f"{stem}-{index + 1:05}-of-{num_parts:05}.gguf"
        values = {**(tiny_values(**more) if index == 0 else {"general.architecture": "llama"}), **split}
        written.append(write_gguf(path, values, dict(tensors[index::num_parts])))
    return written


VALUES = {
    "general.architecture": "toy",
    "general.name": "Toy",
    "toy.block_count": 4,
    "toy.attention.head_count": [8, 8, 16, 16],
    "toy.attention.sliding_window_pattern": [True, True, False, True],
    "toy.xielu.beta": [0.5, 1.5, 2.5, 3.5],
    "toy.rope.dimension_sections": [11, 11, 10, 0],
    "toy.rope.scaling.factors": [1.0, 2.0, 3.0],
    "tokenizer.ggml.four_numbers": [1, 2, 3, 4],
}


def toy_tensors(num_layers: int = 4) -> dict[str, NDArray[np.float32]]:
    sizes = {"token_embd.weight": 50, "output_norm.weight": 7}
    for layer in range(num_layers):
        sizes |= {f"blk.{layer}.attn_q.weight": 9 + layer, f"blk.{layer}.ffn_up.weight": 24}
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def write_decoder(path: Path, architecture: str = "llama", labels: list[str] | None = None, **more: Any) -> Path:
    """The tiny model as a file of another architecture, or with labels as a classifier."""
    values = {key.replace("llama.", f"{architecture}."): item for key, item in tiny_values(**more).items()}
    values["general.architecture"], tensors = architecture, tiny_tensors()
    if architecture == "qwen3":
        norms = ("attn_q_norm", "attn_k_norm")
        tensors |= {f"blk.{layer}.{norm}.weight": np.ones(8, np.float32) for layer in range(_LAYERS) for norm in norms}
    if labels:
        values |= {f"{architecture}.pooling_type": 4, f"{architecture}.classifier.output_labels": labels}
        head = np.random.default_rng(2).standard_normal((len(labels), _WIDTH)) / 8
        tensors["cls.output.weight"] = head.astype(np.float32)
    return write_gguf(path, values, tensors)
