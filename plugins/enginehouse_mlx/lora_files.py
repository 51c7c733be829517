"""Reads adapters (LoRA) from folders: PEFT's format, and that of ``mlx_lm.lora``.

Source: https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/LORA.md and ``LoRALinear`` of mlx-lm for the latter: its
scale is used as it is, not divided by the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from enginehouse_backendkit.lora_folder import (
    LoraHalves,
    check_rank,
    check_scale,
    read_lora_config,
    read_lora_folder,
    refusing,
)

__all__ = ["read_adapter"]

_OWN_WEIGHTS = "adapters.safetensors"


def read_adapter(folder: Path, layers: Mapping[str, tuple[int, int]]) -> dict[str, LoraHalves[mx.array]]:
    """Return the halves of each layer that an adapter changes, by the name of the layer.

    Args:
        folder: with ``adapter_config.json``, and ``adapter_model.safetensors`` (PEFT) or ``adapters.safetensors``.
        layers: outputs and inputs of the layers that can be adapted, by name.

    Raises:
        AdapterRefused: names the folder, and what is wrong.
    """
    if not (folder / _OWN_WEIGHTS).is_file():
        return read_lora_folder(folder, layers, _load, _problem_of)
    with refusing(folder):
        rank, scale = _own_rank_and_scale(read_lora_config(folder))
        return _pair(_load(folder / _OWN_WEIGHTS), rank, scale, layers)


def _own_rank_and_scale(config: Mapping[str, Any]) -> tuple[int, float]:
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise ValueError(f"fine_tune_type = {kind!r} is not supported; only lora is")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ValueError("lora_parameters in adapter_config.json is missing")
    rank = check_rank(parameters.get("rank"), "rank in lora_parameters")
    return rank, check_scale(parameters.get("scale"), "scale in lora_parameters")


def _pair(
    tensors: Mapping[str, mx.array], rank: int, scale: float, layers: Mapping[str, tuple[int, int]]
) -> dict[str, LoraHalves[mx.array]]:
    for name in tensors:
        module, _, half = name.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            raise ValueError(f"the tensor {name!r} is not of plain LoRA")
        if module not in layers:
            raise ValueError(f"{module!r} is not a linear layer of this model that can be adapted")
    made = {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        num_outputs, num_inputs = layers[module]
        halves = [tensors.get(f"{module}.{half}") for half in ("lora_a", "lora_b")]
        wanted = [(num_inputs, rank), (rank, num_outputs)]
        for tensor, shape in zip(halves, wanted, strict=True):
            if tensor is None:
                raise ValueError(f"{module} has only one of lora_a and lora_b")
            if tensor.shape != shape:
                raise ValueError(f"{module}: a shape is {tensor.shape}, {shape} was expected")
            if problem := _problem_of(tensor):
                raise ValueError(f"{module} has {problem}")
        first, second = halves
        assert first is not None and second is not None
        made[module] = LoraHalves(first.T, second.T, scale)
    if not made:
        raise ValueError(f"{_OWN_WEIGHTS} has no tensors")
    return made


def _load(path: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(path))
    except RuntimeError as error:  # MLX's message may name the whole path
        raise ValueError(str(error).replace(str(path), path.name)) from error
    assert isinstance(loaded, dict)
    return loaded


def _problem_of(tensor: mx.array) -> str:
    if tensor.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"numbers of the type {tensor.dtype}"
    return "" if bool(mx.all(mx.isfinite(tensor)).item()) else "numbers that are not finite"
