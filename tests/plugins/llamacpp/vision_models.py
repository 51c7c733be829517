"""Tiny random models with projectors of images, one for each way in which llama.cpp takes them, and test images.

The weights are random, so the texts mean nothing; but the logits depend on every pixel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import write_gguf

from .gguf import tiny_values

_WIDTH, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 36, 68, 2, 6, 2, 6
"""Widths that no kernel takes in blocks of 8, so that the logits of these models do not depend on the batch."""

_VISION_WIDTH, _VISION_INNER, _VISION_LAYERS, _VISION_HEADS = 32, 64, 2, 2
_MARKS = ["\n\n", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"]
_MARKS += ["<start_of_image>", "<end_of_image>", "<|vision_start|>", "<|vision_end|>"]
_CONTROL = 3

Tensors = dict[str, NDArray[np.float32]]


@frozen
class VisionKind:
    """A kind of model with images.

    Attributes:
        architecture: of the text model.
        projector: llama.cpp's name of the projector.
        patch, image: sizes in pixels.
        num_tokens, num_positions: of a square test image.
    """

    architecture: str
    projector: str
    patch: int
    image: int
    num_tokens: int
    num_positions: int


IDEFICS3 = VisionKind("llama", "idefics3", patch=16, image=64, num_tokens=4, num_positions=4)
LLAVA = VisionKind("llama", "mlp", patch=16, image=64, num_tokens=16, num_positions=16)
GEMMA3 = VisionKind("gemma3", "gemma3", patch=8, image=64, num_tokens=16, num_positions=16)
QWEN2VL = VisionKind("qwen2vl", "qwen2vl_merger", patch=8, image=64, num_tokens=16, num_positions=4)
QWEN25VL = VisionKind("qwen2vl", "qwen2.5vl_merger", patch=8, image=64, num_tokens=16, num_positions=4)
KINDS = {kind.projector: kind for kind in (IDEFICS3, LLAVA, GEMMA3, QWEN2VL, QWEN25VL)}


def image(seed: int, width: int = 64, height: int = 64) -> NDArray[np.uint8]:
    """Random pixels, (height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def write_text_model(path: Path, kind: VisionKind, tensors: Tensors | None = None, **more: Any) -> Path:
    """The text half: a tiny model with a vocabulary of bytes, and the marks around images.

    ``tensors`` replace its own.
    """
    name = kind.architecture
    values = {key: item for key, item in tiny_values().items() if not key.startswith("llama.")}
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], *_MARKS]
    values["tokenizer.ggml.scores"] = [0.0] * len(values["tokenizer.ggml.tokens"])
    types = [*values["tokenizer.ggml.token_type"], *[_CONTROL] * len(_MARKS)]
    values["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    sizes = {
        "block_count": _LAYERS,
        "context_length": 512,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _HEAD,
    }
    if name == "gemma3":
        sizes |= {"attention.key_length": _HEAD, "attention.value_length": _HEAD}
    if name == "qwen2vl":
        sizes |= {"rope.dimension_sections": np.array([1, 1, 1, 0], np.int32)}
    values |= {"general.architecture": name, **{f"{name}.{key}": item for key, item in sizes.items()}}
    return write_gguf(path, {**values, **more}, text_tensors(kind) | (tensors or {}))


def text_tensors(kind: VisionKind) -> Tensors:
    """The weights of the text half."""
    rng, architecture = np.random.default_rng(3), kind.architecture
    num_tokens = len(tiny_values()["tokenizer.ggml.tokens"]) + len(_MARKS)
    narrow = _KV_HEADS * _HEAD
    shapes: dict[str, tuple[int, ...]] = {"attn_q": (_WIDTH, _WIDTH), "attn_output": (_WIDTH, _WIDTH)}
    shapes |= {"attn_k": (narrow, _WIDTH), "attn_v": (narrow, _WIDTH)}
    shapes |= {"ffn_gate": (_INNER, _WIDTH), "ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}
    norms = {"attn_norm": _WIDTH, "ffn_norm": _WIDTH}
    if architecture == "gemma3":
        norms |= {"attn_q_norm": _HEAD, "attn_k_norm": _HEAD, "post_attention_norm": _WIDTH, "post_ffw_norm": _WIDTH}
    made = {"token_embd.weight": rng.standard_normal((num_tokens, _WIDTH)).astype(np.float32)}
    made["output_norm.weight"] = np.ones(_WIDTH, np.float32)
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            made[f"blk.{layer}.{name}.weight"] = (rng.standard_normal(shape) / 2).astype(np.float32)
        made |= {f"blk.{layer}.{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
        if architecture == "qwen2vl":
            biases = {name: shapes[name][0] for name in ("attn_q", "attn_k", "attn_v")}
            made |= {f"blk.{layer}.{name}.bias": np.zeros(size, np.float32) for name, size in biases.items()}
    return made


def write_projector(
    path: Path, kind: VisionKind, width: int = _WIDTH, seed: int = 4, tensors: Tensors | None = None, **more: Any
) -> Path:
    """The projector of images for text models of ``width``; ``tensors`` replace its own."""
    sizes = {
        "image_size": kind.image,
        "patch_size": kind.patch,
        "embedding_length": _VISION_WIDTH,
        "feed_forward_length": _VISION_INNER,
        "block_count": _VISION_LAYERS,
        "projection_dim": width,
        "attention.head_count": _VISION_HEADS,
        "attention.layer_norm_epsilon": 1e-6,
        "projector.scale_factor": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    if kind is QWEN25VL:
        sizes |= {"n_wa_pattern": 2}
    values = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind.projector,
        "clip.use_gelu": True,
        **{f"clip.vision.{key}": item for key, item in sizes.items()},
    }
    made = _projector_tensors(kind, width, np.random.default_rng(seed))
    return write_gguf(path, {**values, **more}, made | (tensors or {}))


def _projector_tensors(kind: VisionKind, width: int, rng: np.random.Generator) -> Tensors:
    def random(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    patches = random(_VISION_WIDTH, 3, kind.patch, kind.patch)
    made: Tensors = {"v.patch_embd.weight": patches}
    is_qwen = kind.architecture == "qwen2vl"
    if is_qwen:
        made["v.patch_embd.weight.1"] = random(_VISION_WIDTH, 3, kind.patch, kind.patch)
    else:
        made["v.patch_embd.bias"] = random(_VISION_WIDTH)
        made["v.position_embd.weight"] = random((kind.image // kind.patch) ** 2, _VISION_WIDTH)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (_VISION_WIDTH, _VISION_WIDTH))
    shapes |= {"ffn_up": (_VISION_INNER, _VISION_WIDTH), "ffn_down": (_VISION_WIDTH, _VISION_INNER)}
    if kind is QWEN25VL:
        shapes["ffn_gate"] = (_VISION_INNER, _VISION_WIDTH)
    for layer in range(_VISION_LAYERS):
        for name, shape in shapes.items():
            made[f"v.blk.{layer}.{name}.weight"], made[f"v.blk.{layer}.{name}.bias"] = random(*shape), random(shape[0])
        for name in ("ln1", "ln2"):
            made |= _norm(f"v.blk.{layer}.{name}")
    made |= _norm("v.post_ln")
    merged = 4 * _VISION_WIDTH
    if kind is IDEFICS3:
        made["mm.model.fc.weight"] = random(width, merged)
    elif kind is GEMMA3:
        made["mm.soft_emb_norm.weight"] = np.ones(_VISION_WIDTH, np.float32)
        made["mm.input_projection.weight"] = random(_VISION_WIDTH, width)
    else:
        inner = merged if is_qwen else _VISION_WIDTH
        made |= {"mm.0.weight": random(inner, inner), "mm.0.bias": random(inner)}
        made |= {"mm.2.weight": random(width, inner), "mm.2.bias": random(width)}
    return made


def _norm(name: str) -> Tensors:
    return {f"{name}.weight": np.ones(_VISION_WIDTH, np.float32), f"{name}.bias": np.zeros(_VISION_WIDTH, np.float32)}
