"""Hugging Face style model folders: ``config.json`` and ``*.safetensors``, read without any library.

Called by backends that load such folders, to match a source and to estimate memory before their library is imported. It
knows names and sizes of files and a few keys of the configuration; it does not know the weights.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import field, frozen

from enginehouse.contract.backend import MemoryEstimate, ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular
from enginehouse_backendkit.folder_files import check_shards, check_texts, describe_folder, read_object
from enginehouse_backendkit.layer_kinds import count_layers, has_states, state_size

__all__ = [
    "DEFAULT_CONTEXT",
    "ModelFolder",
    "check_model_files",
    "check_weights",
    "describe_failure",
    "describe_pickles",
    "no_folder",
    "pickled_weights",
    "recommended_parameters",
    "served_context",
]

DEFAULT_CONTEXT = 4096
"""Default longest sequence in tokens, unless the user sets one or the model's is shorter."""

_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Keys of ``generation_config.json`` that apply to sampling only and have the names of request fields."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_MAX_LAYERS = 10_000
_MAX_EXPERTS = 10_000
_MAX_MODULES = 1_000_000  # layers times experts; the largest models have a few tens of thousands
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MAX_SIZE = 2**31
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "llama": {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
}
"""Sizes that the text configurations of published Gemma 3 and LLaVA models leave out, by ``model_type``.

Source: the defaults of Gemma3TextConfig and LlamaConfig in transformers 5.24.
"""
_MIB = 2**20
_MAX_HEADER_BYTES = 16 * _MIB  # of safetensors; headers of models with 60,000 tensors have half of that
_MAX_FILE_BYTES = {
    "config.json": 4 * _MIB,
    "generation_config.json": 4 * _MIB,
    "tokenizer.json": 128 * _MIB,
    ".json": 64 * _MIB,
    ".model": 64 * _MIB,
    ".tiktoken": 64 * _MIB,
    ".txt": 64 * _MIB,
    ".jinja": 4 * _MIB,
}
"""Limit by file name, else by suffix. The largest files in use have about a quarter of it."""


@frozen
class ModelFolder:
    """A folder that contains a model. ``config`` is the decoded ``config.json``."""

    path: Path
    config: dict[str, Any] = field(repr=False)

    @classmethod
    def find(cls, source: ModelSource) -> ModelFolder | None:
        """Return the folder of ``source``, or None if it is anything else.

        Raises:
            ModelLoadError: a file cannot be read or is missing: see :func:`check_model_files` and
                :mod:`enginehouse_backendkit.folder_files`.
        """
        path = source.path
        if path is None or not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            return None
        check_model_files(path)
        check_shards(path)
        check_texts(path)
        folder = cls(path, read_object(path / "config.json"))
        folder._check_modules()
        return folder

    def _check_modules(self) -> None:
        """Check how many modules a library would create, before it looks for their weights."""
        for part in (self.config, *filter(None, (_object(value) for value in self.config.values()))):
            layers = max(self._size(part, key, 1) for key in _LAYERS)
            experts = max(self._size(part, key, 1) for key in _EXPERTS)
            if layers * experts > _MAX_MODULES:
                raise ModelLoadError(f"{self.path / 'config.json'} has {layers} layers of {experts} experts")

    @property
    def is_mlx_quantized(self) -> bool:
        """True if the weights are quantized in MLX's own format, which only MLX reads."""
        return "quantization" in self.config

    def estimate(self, context_tokens: int, dtype: str | None, num_states: int = 0) -> MemoryEstimate:
        """Estimate memory for weights in ``dtype`` (None: as stored) and ``context_tokens`` KV positions.

        Args:
            num_states: number of states of recurrent layers, of sequences and checkpoints.

        Raises:
            ModelLoadError: the configuration does not contain the sizes.
        """
        text = self.config.get("text_config") or self.config
        if not isinstance(text, dict):
            raise ModelLoadError(f"{self.path / 'config.json'}: text_config is not a JSON object")
        text = {**_LEFT_OUT.get(str(text.get("model_type")), {}), **text}
        stored = self._stored_dtype()
        size_bytes = _BYTES.get(dtype or stored, 4)
        weights = self.weights_bytes(dtype)
        size = partial(self._size, text)
        heads = size("num_attention_heads", 0 if has_states(text) else None)
        counts, per_token, states = count_layers(text, size), 0, 0
        if counts.attention:
            kv_heads = size("num_key_value_heads", heads)
            head_dim = size("head_dim", 0) or size("attention_head_dim", 0) or size("hidden_size") // max(heads, 1)
            per_token = 2 * counts.attention * kv_heads * head_dim * size_bytes
        if counts.recurrent:
            states = num_states * counts.recurrent * state_size(text, size) * _BYTES["float32"]
        return MemoryEstimate(weights, per_token, weights + context_tokens * per_token + states)

    def weights_bytes(self, dtype: str | None) -> int:
        """Return the size of the weights in ``dtype``; None: as stored."""
        weights = sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
        if dtype is None or self.is_mlx_quantized:
            return weights
        stored = self._stored_dtype()
        return weights * _BYTES.get(dtype, 4) // _BYTES.get(stored, 4)

    def _stored_dtype(self) -> str:
        """Return the data type that the text's configuration names, else the whole model's."""
        parts = (_object(self.config.get("text_config")), self.config)
        named = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
        return next((name for name in named if isinstance(name, str)), "float32")

    def _size(self, text: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """Return a size of the configuration, checked before any arithmetic: Python multiplies strings, too."""
        value = text.get(key)
        if value is None or (value == 0 and default is not None):
            if default is None:
                raise ModelLoadError(f"{self.path / 'config.json'} has no {key!r}")
            return default
        most = _MAX_LAYERS if key in _LAYERS else _MAX_EXPERTS if key in _EXPERTS else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ModelLoadError(f"{self.path / 'config.json'} has an invalid size: {key} is {str(value)[:40]!r}")
        return value


def check_model_files(path: Path) -> None:
    """Check that all files a library will open in a model's folder are regular and within their size limits.

    Raises:
        ModelLoadError: it contains a pipe, a socket or a device, or a file over its limit.
    """
    for folder in (path, path / "additional_chat_templates"):
        for file in folder.iterdir() if folder.is_dir() else ():
            try:
                found = file.stat()
            except OSError:  # a broken link
                continue
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                raise ModelLoadError(f"{file} is not a regular file; remove it from the model's folder")
            most = _MAX_FILE_BYTES.get(file.name, _MAX_FILE_BYTES.get(file.suffix))
            if most is not None and found.st_size > most and stat.S_ISREG(found.st_mode):
                raise ModelLoadError(
                    f"{file} has {found.st_size} bytes; a file of this name in a model's folder has at most {most}"
                )


def check_weights(path: Path) -> None:
    """Check the header sizes of the safetensors files in a folder, before a library parses them.

    Raises:
        ModelLoadError: a header is longer than any model needs.
    """
    for file in path.glob("*.safetensors"):
        try:
            with open_regular(file) as weights:
                num_bytes = int.from_bytes(weights.read(8), "little")
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
        if num_bytes > _MAX_HEADER_BYTES:
            raise ModelLoadError(f"{file}: its header would have {num_bytes} bytes; it is damaged")


def pickled_weights(path: Path | None) -> tuple[str, ...]:
    """Return the names of pickled weight files in a model's folder, if it has no safetensors; else none.

    Reading a pickle runs arbitrary code from its author.
    """
    if path is None or not (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return ()
    return tuple(sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)))


def describe_pickles(names: tuple[str, ...]) -> str:
    """Explain why such weights are not read."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"its weights ({shown}) are pickles, which run code when they are read; convert them to safetensors"


def describe_failure(error: Exception) -> str:
    """Return what a library said about a folder; its mistakes with values of a wrong type are not messages."""
    if isinstance(error, TypeError | AttributeError | LookupError):
        return f"{type(error).__name__}: {error} (a value in its JSON files is missing or of a wrong type)"
    return str(error)


def no_folder(source: ModelSource) -> str:
    """Return why a source is not a :class:`ModelFolder`."""
    if source.path is None or not source.path.is_dir():
        return "not a folder with config.json and safetensors"
    return describe_folder(source.path)


def recommended_parameters(folder: Path) -> dict[str, Any]:
    """Return request fields that the folder's ``generation_config.json`` recommends; may be empty.

    With ``do_sample`` off the sampling values have no effect in transformers either. Length limits are not taken: the
    server and its clients decide the length of an answer.
    """
    try:
        config = read_object(folder / "generation_config.json")
    except ModelLoadError:
        return {}  # the file is optional
    names = ("repetition_penalty", *(() if config.get("do_sample") is False else _RECOMMENDED))
    return {name: config[name] for name in names if _is_number(config.get(name))}


def _is_number(value: Any) -> bool:
    """True if the value is a number that every part of the server can handle."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_SIZE


def served_context(config: Mapping[str, Any], wanted: int | None, usual: int = DEFAULT_CONTEXT) -> int:
    """Return the context to serve for a model with this configuration, in tokens: ``wanted``, else at most ``usual``.

    Rotary embeddings that depend on the longest sequence of a batch (``dynamic``, ``longrope``) would let one request
    change another's text; such models are limited to the length below which they are constant.

    Raises:
        ModelLoadError: ``wanted`` is more than the model supports.
    """
    text = _object(config.get("text_config")) or config
    limit = _tokens(text, "max_position_embeddings") or wanted or usual
    rope = _object(text.get("rope_parameters")) or _object(text.get("rope_scaling"))
    if any(rope.get(key) in ("dynamic", "longrope") for key in ("rope_type", "type")):
        key = "original_max_position_embeddings"
        limit = min(limit, _tokens(rope, key) or _tokens(text, key) or limit)
    if wanted is not None and wanted > limit:
        raise ModelLoadError(f"context = {wanted} is more than this model supports ({limit})")
    return wanted or min(limit, usual)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tokens(values: Mapping[str, Any], key: str) -> int | None:
    """Return a token count, at most 2^31, or None if absent. Raises ModelLoadError for an invalid value."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ModelLoadError(f"config.json: {key} is {str(value)[:40]!r}, which is not a number of tokens")
    return min(int(value), _MAX_SIZE)
