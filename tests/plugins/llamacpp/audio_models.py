"""A tiny random projector of recordings of Whisper's kind, as Ultravox has it, and recordings to test with.

The weights are random, but the logits depend on every frame. A part of 30 seconds is 15 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse_testkit.gguf_writer import write_gguf

RATE = 16_000
NUM_TOKENS = 15
NUM_BINS = 16

_WIDTH, _INNER, _LAYERS, _HEADS, _POSITIONS, _STACK, _MIDDLE = 32, 64, 2, 2, 1500, 100, 24


def recording(seed: int, seconds: float = 1.0) -> NDArray[np.float32]:
    """A sum of random tones, (num_samples,) float32."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(RATE * seconds)) / RATE
    tones = [np.sin(2 * np.pi * frequency * times) for frequency in rng.uniform(100, 6000, 5)]
    return (np.sum(tones, axis=0) / 10).astype(np.float32)


def audio_values(width: int) -> dict[str, Any]:
    """The sizes of the encoder, and of its projector for text models of ``width``."""
    sizes = {
        "projector_type": "ultravox",
        "num_mel_bins": NUM_BINS,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "block_count": _LAYERS,
        "projection_dim": width,
        "attention.head_count": _HEADS,
        "attention.layer_norm_epsilon": 1e-5,
        "projector.stack_factor": _STACK,
    }
    return {"clip.has_audio_encoder": True, **{f"clip.audio.{key}": item for key, item in sizes.items()}}


def write_audio_projector(path: Path, width: int = 36, **more: Any) -> Path:
    """The projector for text models of ``width``."""
    values = {"general.architecture": "clip", "general.type": "mmproj", **audio_values(width)}
    return write_gguf(path, {**values, **more}, audio_tensors(width))


def audio_tensors(width: int) -> dict[str, NDArray[np.float32]]:
    """The weights of the encoder and of its projector."""
    rng = np.random.default_rng(5)

    def random(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    made = {"a.position_embd.weight": random(_POSITIONS, _WIDTH)}
    for number, channels in ((1, NUM_BINS), (2, _WIDTH)):
        made[f"a.conv1d.{number}.weight"] = random(_WIDTH, channels, 3)
        made[f"a.conv1d.{number}.bias"] = random(_WIDTH, 1) / 10
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (_WIDTH, _WIDTH))
    shapes |= {"ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            made[f"a.blk.{layer}.{name}.weight"] = random(*shape)
            if name != "attn_k":
                made[f"a.blk.{layer}.{name}.bias"] = np.zeros(shape[0], np.float32)
        for name in ("ln1", "ln2"):
            made[f"a.blk.{layer}.{name}.weight"] = np.ones(_WIDTH, np.float32)
            made[f"a.blk.{layer}.{name}.bias"] = np.zeros(_WIDTH, np.float32)
    made |= {"a.post_ln.weight": np.ones(_WIDTH, np.float32), "a.post_ln.bias": np.zeros(_WIDTH, np.float32)}
    made |= {"mm.a.norm_pre.weight": np.ones(_WIDTH * _STACK, np.float32)}
    made |= {"mm.a.norm_mid.weight": np.ones(_MIDDLE, np.float32)}
    made |= {"mm.a.mlp.1.weight": random(2 * _MIDDLE, _WIDTH * _STACK), "mm.a.mlp.2.weight": random(width, _MIDDLE)}
    return made
