"""A Hugging Face style model folder: ``config.json`` beside ``*.safetensors``, read without any library.

Called by backends that load such folders, to match a source and to estimate memory before their library
is imported. It knows names and sizes of files and a few keys of the configuration, nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from enginehouse.backend import MemoryEstimate, ModelSource
from enginehouse.errors import ModelLoadError

__all__ = [
    "DEFAULT_CONTEXT",
    "ModelFolder",
    "describe_pickles",
    "pickled_weights",
    "recommended_parameters",
    "served_context",
]

DEFAULT_CONTEXT = 4096
"""Longest sequence in tokens when neither the user nor a shorter model says so."""

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""What ``generation_config.json`` calls as request fields do, and applies to drawing only."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@frozen
class ModelFolder:
    """A folder that holds a model. ``config`` is the decoded ``config.json``."""

    path: Path
    config: dict[str, Any] = field(repr=False)

    @classmethod
    def find(cls, source: ModelSource) -> ModelFolder | None:
        """The folder of ``source``, or None when it is anything else.

        Raises:
            ModelLoadError: there is a ``config.json`` but it cannot be read.
        """
        path = source.path
        if path is None or not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            return None
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path / 'config.json'} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ModelLoadError(f"{path / 'config.json'} is not a JSON object")
        return cls(path, config)

    @property
    def is_mlx_quantized(self) -> bool:
        """Whether the weights are packed in MLX's own format, which only MLX reads."""
        return "quantization" in self.config

    def estimate(self, context_tokens: int, dtype: str | None) -> MemoryEstimate:
        """Memory of the weights in ``dtype`` (None: as stored) and of ``context_tokens`` KV positions.

        Raises:
            ModelLoadError: the configuration lacks the sizes.
        """
        text = self.config.get("text_config") or self.config
        if not isinstance(text, dict):
            raise ModelLoadError(f"{self.path / 'config.json'}: text_config is not a JSON object")
        stored = str(text.get("dtype", text.get("torch_dtype", "float32")))
        size_bytes = _BYTES.get(dtype or stored, 4)
        weights = sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
        if not self.is_mlx_quantized:
            weights = weights * size_bytes // _BYTES.get(stored, 4)
        try:
            heads = text["num_attention_heads"]
            head_dim = text.get("head_dim") or text["hidden_size"] // heads
            per_token = (
                2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * head_dim * size_bytes
            )
        except KeyError as error:
            raise ModelLoadError(f"{self.path / 'config.json'} has no {error}") from error
        except (TypeError, ZeroDivisionError) as error:
            raise ModelLoadError(f"{self.path / 'config.json'} has sizes that are none: {error}") from error
        if not isinstance(per_token, int) or per_token < 0:
            raise ModelLoadError(f"{self.path / 'config.json'} has sizes that are none")
        return MemoryEstimate(weights, per_token, weights + context_tokens * per_token)


def pickled_weights(path: Path | None) -> tuple[str, ...]:
    """Names of the files with weights in a model's folder that are pickles, where it has no safetensors; else none.

    Reading a pickle runs whatever code its author put into it.
    """
    if path is None or not (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return ()
    return tuple(sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)))


def describe_pickles(names: tuple[str, ...]) -> str:
    """Why such weights are not read."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"its weights ({shown}) are pickles, which run code when they are read; convert them to safetensors"


def recommended_parameters(folder: Path) -> dict[str, Any]:
    """Request fields that the folder's ``generation_config.json`` recommends; empty where it says nothing.

    With ``do_sample`` off the values for drawing have no effect in transformers either. Lengths are not taken: how
    long an answer may be is for the server and its clients to say.
    """
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # an optional file, which other programs read as carefully
    if not isinstance(config, dict):
        return {}
    names = ("repetition_penalty", *(() if config.get("do_sample") is False else _RECOMMENDED))
    return {name: config[name] for name in names if config.get(name) is not None}


def served_context(config: Mapping[str, Any], wanted: int | None) -> int:
    """The context to serve for a model with this configuration, in tokens.

    Rotary embeddings that change with the longest sequence of a batch (``dynamic``, ``longrope``) would let
    one request change another's text; such models are served up to the length where they do not change.

    Raises:
        ModelLoadError: ``wanted`` is more than the model supports.
    """
    text = config.get("text_config") or config
    limit = int(text.get("max_position_embeddings") or wanted or DEFAULT_CONTEXT)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if {rope.get("rope_type"), rope.get("type")} & {"dynamic", "longrope"}:
        key = "original_max_position_embeddings"
        limit = min(limit, int(rope.get(key) or text.get(key) or limit))
    if wanted is not None and wanted > limit:
        raise ModelLoadError(f"context = {wanted} is more than this model supports ({limit})")
    return wanted or min(limit, DEFAULT_CONTEXT)
