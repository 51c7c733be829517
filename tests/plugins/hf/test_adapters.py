"""Adapters of PEFT's folders on transformers models: the contract, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import AdapterRefused
from enginehouse_hf.adapters import read_peft_folder
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract
from enginehouse_testkit.contract.opening import ModelUnderTest

pytestmark = pytest.mark.hf

Tensors = dict[str, NDArray[np.float32]]

_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": list(_TARGETS),
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {"o_proj": 2},
    "alpha_pattern": {"v_proj": 16},
}
_OPTIONS = HfOptions(device="cpu", context=64, slots=4, max_batch_tokens=128, threads=1)


def weights_of(model: Path) -> Tensors:
    return {name: data for file in sorted(model.glob("*.safetensors")) for name, data in load_file(file).items()}


def rank_of(name: str) -> int:
    return 2 if "o_proj" in name else 4


def scale_of(name: str, config: Mapping[str, Any]) -> float:
    alpha, rank = (16 if "v_proj" in name else 8), rank_of(name)
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def lora_tensors(model: Path, seed: int) -> Tensors:
    rng, made = np.random.default_rng(seed), Tensors()
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in _TARGETS:
            num_outputs, num_inputs = weight.shape
            rank = rank_of(module)
            made[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, num_inputs)) / 8
            made[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((num_outputs, rank)) / 8
    return {name: data.astype(np.float32) for name, data in made.items()}


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**_CONFIG, **config}), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


class TestHfAdapters(AdapterContract):
    """The second adapter is rank-stabilised; ranks and alphas differ between layers."""

    max_logit_difference = 2e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: Callable[[str], Path]) -> ModelUnderTest:
        path = tiny_model("llama")
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=_OPTIONS)

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        folder, model = tmp_path_factory.mktemp("adapters"), tiny_model("llama")
        first = write_adapter(folder / "one", lora_tensors(model, 1))
        second = write_adapter(folder / "two", lora_tensors(model, 2), use_rslora=True)

        def open_merged(merged: Mapping[Path, float]) -> Runner:
            copied = folder / f"merged-{len(list(folder.iterdir()))}"
            shutil.copytree(model, copied)
            weights = weights_of(copied)
            for path, scale in merged.items():
                config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
                halves = load_file(path / "adapter_model.safetensors")
                for name in weights:
                    module = f"base_model.model.{name.removesuffix('.weight')}"
                    if f"{module}.lora_A.weight" in halves:
                        update = halves[f"{module}.lora_B.weight"] @ halves[f"{module}.lora_A.weight"]
                        weights[name] = weights[name] + np.float32(scale * scale_of(module, config)) * update
            for file in copied.glob("*.safetensors*"):
                file.unlink()
            save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
            opened = HfBackend().open(ModelSource(str(copied), copied), _OPTIONS, lambda share, what: None)
            assert isinstance(opened, Runner)
            return opened

        damaged = (write_adapter(folder / "dora", lora_tensors(model, 1), use_dora=True), model)
        return AdaptedModel((first, second), open_merged, damaged)


def _with(changed: Mapping[str, NDArray[np.float32] | None]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {name: data for name, data in {**tensors, **changed}.items() if data is not None}

    return change


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "DoRA": ({"use_dora": True}, _with({}), "use_dora"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, _with({}), "modules_to_save"),
    "bias": ({"bias": "lora_only"}, _with({}), "bias"),
    "PiSSA": ({"init_lora_weights": "pissa"}, _with({}), "init_lora_weights"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, _with({}), "alora_invocation_tokens"),
    "not LoRA": ({"peft_type": "IA3"}, _with({}), "peft_type"),
    "rank 0": ({"r": 0}, _with({}), "rank"),
    "rank is a text": ({"r": "4"}, _with({}), "rank"),
    "alpha is a text": ({"lora_alpha": "8"}, _with({}), "lora_alpha"),
    "other rank": ({"r": 8}, _with({}), "shapes"),
    "other shape": ({}, _with({f"{_Q}.lora_A.weight": np.ones((4, 63), np.float32)}), "shapes"),
    "half a pair": ({}, _with({f"{_Q}.lora_A.weight": None}), "only one of"),
    "NaN": ({}, _with({f"{_Q}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}), "not finite"),
    "magnitudes": ({}, _with({f"{_Q}.lora_magnitude_vector": np.ones(64, np.float32)}), "plain LoRA"),
    "embedding": (
        {},
        _with({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9), np.float32)}),
        "plain LoRA",
    ),
    "output layer": ({}, _with({"base_model.model.lm_head.lora_A.weight": np.ones((4, 64), np.float32)}), "lm_head"),
    "unknown layer": (
        {},
        _with({_Q.replace("0", "9") + ".lora_A.weight": np.ones((4, 64), np.float32)}),
        "not a linear layer",
    ),
}


@pytest.fixture(scope="module")
def linears(llama: Path) -> dict[str, torch.nn.Linear]:
    """Layers of the right sizes, by the names of the model's."""
    found = {}
    for name, weight in weights_of(llama).items():
        if name.removesuffix(".weight").rpartition(".")[2] in _TARGETS:
            found[name.removesuffix(".weight")] = torch.nn.Linear(weight.shape[1], weight.shape[0])
    return found


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_folders_that_are_not_plain_lora_are_refused_by_name(
    llama: Path,
    linears: dict[str, torch.nn.Linear],
    tmp_path: Path,
    case: tuple[dict[str, Any], Callable[[Tensors], Tensors], str],
) -> None:
    config, change, problem = case
    folder = write_adapter(tmp_path / "refused", change(lora_tensors(llama, 1)), **config)
    with pytest.raises(AdapterRefused, match=problem) as caught:
        read_peft_folder(folder, linears)

    assert "refused" in caught.value.message and str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_and_missing_files_are_refused(
    llama: Path, linears: dict[str, torch.nn.Linear], tmp_path: Path, name: str
) -> None:
    folder = write_adapter(tmp_path / "damaged", lora_tensors(llama, 1))
    whole = (folder / name).read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"{", b"\xff" * 64, None):
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(AdapterRefused):
            read_peft_folder(folder, linears)
        (folder / name).write_bytes(whole)

    assert read_peft_folder(folder, linears)
