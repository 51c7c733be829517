"""LoRA folders in PEFT's format for tiny models, and these models with the adapters merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from enginehouse.contract.backend import Runner
from enginehouse_testkit.adapter_contract import AdaptedModel

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": list(TARGETS),
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {"o_proj": 2},
    "alpha_pattern": {"v_proj": 16},
}

Tensors = dict[str, NDArray[np.float32]]


def weights_of(model: Path) -> Tensors:
    """Return all weights of a model's folder."""
    return {name: data for file in sorted(model.glob("*.safetensors")) for name, data in load_file(file).items()}


def rank_of(name: str) -> int:
    """Return the rank of a module of that name."""
    return 2 if "o_proj" in name else 4


def scale_of(name: str, config: Mapping[str, Any]) -> float:
    """Return the adapter's own strength for a module."""
    alpha, rank = (16 if "v_proj" in name else 8), rank_of(name)
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def lora_tensors(model: Path, seed: int) -> Tensors:
    """Return random halves for every target of the model."""
    rng, made = np.random.default_rng(seed), Tensors()
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            num_outputs, num_inputs = weight.shape
            rank = rank_of(module)
            made[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, num_inputs)) / 8
            made[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((num_outputs, rank)) / 8
    return {name: data.astype(np.float32) for name, data in made.items()}


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write a folder in PEFT's format, and return it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_merged(folder: Path, model: Path, merged: Mapping[Path, float]) -> Path:
    """Write a copy of a model with adapters, by their scales, added to its weights."""
    shutil.copytree(model, folder)
    weights = weights_of(folder)
    for path, scale in merged.items():
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        halves = load_file(path / "adapter_model.safetensors")
        for name in weights:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in halves:
                update = halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]
                weights[name] = weights[name] + np.float32(scale * scale_of(module, config)) * update
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapted_model(folder: Path, model: Path, open_model: Callable[[Path], Runner]) -> AdaptedModel:
    """Return two adapters of a model, written to a folder, and how to open it with merged weights.

    The second adapter is rank-stabilised; ranks and alphas differ between layers.
    """
    first = write_adapter(folder / "one", lora_tensors(model, 1))
    second = write_adapter(folder / "two", lora_tensors(model, 2), use_rslora=True)

    def open_merged(merged: Mapping[Path, float]) -> Runner:
        return open_model(write_merged(folder / f"merged-{len(list(folder.iterdir()))}", model, merged))

    damaged = (write_adapter(folder / "dora", lora_tensors(model, 1), use_dora=True), model)
    activated = write_adapter(folder / "activated", lora_tensors(model, 3), alora_invocation_tokens=[9, 10])
    return AdaptedModel((first, second), open_merged, damaged, (activated, (9, 10)))
