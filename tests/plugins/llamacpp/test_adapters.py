"""Adapters on llama.cpp: the contract on a tiny model, and files that would end the process."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import AdapterRefused
from enginehouse_llamacpp.adapters import check_adapter_file
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.gguf_writer import write_gguf

from .gguf import tiny_tensors, tiny_values

_RANK, _ALPHA = 4, 8.0
_TARGETS = ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_down")
_VALUES = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": _ALPHA,
}

Tensors = dict[str, NDArray[np.float32]]


def lora_tensors(seed: int) -> Tensors:
    """Random halves for some weights of the tiny model; large enough to change its logits."""
    rng, made = np.random.default_rng(seed), Tensors()
    for name, weight in tiny_tensors().items():
        if name.split(".")[-2] in _TARGETS:
            num_outputs, num_inputs = weight.shape
            made[f"{name}.lora_a"] = rng.standard_normal((_RANK, num_inputs)).astype(np.float32) / 4
            made[f"{name}.lora_b"] = rng.standard_normal((num_outputs, _RANK)).astype(np.float32) / 4
    return made


def write_lora(path: Path, seed: int = 1, values: Mapping[str, Any] = {}, tensors: Tensors | None = None) -> Path:
    return write_gguf(path, {**_VALUES, **values}, tensors if tensors is not None else lora_tensors(seed))


def write_merged(path: Path, merged: Mapping[int, float]) -> Path:
    """The tiny model with adapters merged into its weights, by seed and scale."""
    weights = tiny_tensors()
    for seed, scale in merged.items():
        halves = lora_tensors(seed)
        for name in weights:
            if f"{name}.lora_a" in halves:
                update = halves[f"{name}.lora_b"] @ halves[f"{name}.lora_a"]
                weights[name] = weights[name] + np.float32(scale * _ALPHA / _RANK) * update
    return write_gguf(path, tiny_values(), weights)


class TestLlamaCppAdapters(AdapterContract):
    """Float32 weights, so that merging rounds no more than computing; keys and values are float16."""

    max_logit_difference = 0.05
    exact = False

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        path = write_merged(tmp_path_factory.mktemp("base") / "base.gguf", {})
        options = LlamaCppOptions(context=64, cache_tokens=512, threads=1)
        return ModelUnderTest(backend=LlamaCppBackend(), source=ModelSource("base", path), options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        folder = tmp_path_factory.mktemp("adapters")
        seeds = {write_lora(folder / "one.gguf", 1): 1, write_lora(folder / "two.gguf", 2): 2}

        def open_merged(merged: Mapping[Path, float]) -> Runner:
            path = write_merged(folder / "merged.gguf", {seeds[one]: scale for one, scale in merged.items()})
            options = LlamaCppOptions(context=64, cache_tokens=512, threads=1)
            opened = LlamaCppBackend().open(ModelSource("merged", path), options, lambda share, what: None)
            assert isinstance(opened, Runner)
            return opened

        wrong_shape = lora_tensors(1)
        wrong_shape["blk.0.attn_q.weight.lora_a"] = np.ones((_RANK, 16), np.float32)
        missing_layer = {name.replace("blk.1", "blk.7"): data for name, data in lora_tensors(1).items()}
        damaged = (
            write_lora(folder / "other-architecture.gguf", values={"general.architecture": "qwen2"}),
            write_lora(folder / "wrong-shape.gguf", tensors=wrong_shape),
            write_lora(folder / "missing-layer.gguf", tensors=missing_layer),
        )
        first, second = seeds
        values = {"adapter.alora.invocation_tokens": [9, 10]}
        activated = write_lora(folder / "activated.gguf", 3, values)
        return AdaptedModel((first, second), open_merged, damaged, (activated, (9, 10)))


def _cut(path: Path) -> Path:
    write_lora(path)
    path.write_bytes(path.read_bytes()[:-64])
    return path


def _changed(name: str, data: NDArray[np.float32] | None) -> Tensors:
    made = lora_tensors(1)
    made.pop(name, None)
    return made | ({name: data} if data is not None else {})


_A = "blk.0.attn_q.weight.lora_a"
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a model": (lambda path: write_gguf(path, tiny_values(), tiny_tensors()), "not an adapter"),
    "no file": (lambda path: path, "cannot be read"),
    "text": (lambda path: (path.write_text("not GGUF"), path)[1], "magic"),
    "cut": (_cut, "it ends in"),
    "type is a number": (lambda path: write_lora(path, values={"general.type": 3}), "not an adapter"),
    "alpha is a text": (lambda path: write_lora(path, values={"adapter.lora.alpha": "8"}), "alpha"),
    "alpha is not finite": (lambda path: write_lora(path, values={"adapter.lora.alpha": float("nan")}), "alpha"),
    "architecture is a number": (lambda path: write_lora(path, values={"general.architecture": 1}), "architecture"),
    "activated by a text": (
        lambda path: write_lora(path, values={"adapter.alora.invocation_tokens": "1"}),
        "invocation_tokens is not an array of uint32",
    ),
    "activated by texts": (
        lambda path: write_lora(path, values={"adapter.alora.invocation_tokens": ["1"]}),
        "invocation_tokens is not an array of uint32",
    ),
    "no tensors": (lambda path: write_lora(path, tensors={}), "no tensors"),
    "half a pair": (lambda path: write_lora(path, tensors=_changed(_A, None)), "only one of"),
    "rank 0": (lambda path: write_lora(path, tensors=_changed(_A, np.ones((0, 32), np.float32))), "shape"),
    "other rank": (lambda path: write_lora(path, tensors=_changed(_A, np.ones((2, 32), np.float32))), "ranks"),
    "NaN": (
        lambda path: write_lora(path, tensors=_changed(_A, np.full((_RANK, 32), np.nan, np.float32))),
        "not finite",
    ),
    "norm": (
        lambda path: write_lora(path, tensors=lora_tensors(1) | {"blk.0.attn_norm.weight": np.ones(32, np.float32)}),
        "does not apply",
    ),
    "three dimensions": (
        lambda path: write_lora(path, tensors=_changed(_A, np.ones((2, _RANK, 32), np.float32))),
        "shape",
    ),
}


@pytest.mark.parametrize(("make", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_before_llama_cpp_reads_them(
    tmp_path: Path, make: Callable[[Path], Path], problem: str
) -> None:
    path = make(tmp_path / "hostile.gguf")
    with pytest.raises(AdapterRefused, match=problem) as caught:
        check_adapter_file(path)

    assert path.name in caught.value.message and str(tmp_path) not in caught.value.message


def test_every_cut_and_every_changed_byte_of_a_head_is_survived(tmp_path: Path) -> None:
    """A refusal or, where the change does not matter, none; never another exception."""
    whole = write_lora(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "changed.gguf"
    variants = [whole[:length] for length in range(0, 400, 7)]
    variants += [whole[:at] + struct.pack("B", whole[at] ^ 0xFF) + whole[at + 1 :] for at in range(0, 1200, 5)]
    num_refused = 0
    for data in variants:
        path.write_bytes(data)
        try:
            check_adapter_file(path)
        except AdapterRefused:
            num_refused += 1

    assert num_refused > len(variants) / 2
