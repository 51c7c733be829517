"""The hf backend without a model: what it registers, what it matches, and how it fails."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.pooling.recipe import Recipe
from enginehouse_testkit.contract.model_folder import changed_folder

pytestmark = pytest.mark.hf

TinyModel = Callable[[str], Path]


def _source(path: Path) -> ModelSource:
    return ModelSource(str(path), path)


def _open(path: Path, **options: object) -> Runner:
    return HfBackend().open(_source(path), HfOptions(threads=1, device="cpu", **options), lambda _share, _what: None)  # type: ignore[arg-type]


def test_match_prefers_folders_to_gguf_files(tiny_model: TinyModel, smollm2_gguf: Path, tmp_path: Path) -> None:
    backend = HfBackend()
    folder, gguf = backend.match(_source(tiny_model("llama"))), backend.match(_source(smollm2_gguf))
    quantized = changed_folder(tiny_model("llama"), tmp_path / "mlx", quantization={"bits": 4})

    assert folder.score > gguf.score > 0
    assert backend.match(_source(quantized)).score == 0
    assert backend.match(_source(tmp_path)).score == 0
    assert backend.match(ModelSource("org/model")).score == 0


def test_estimate_counts_what_a_gguf_file_becomes(smollm2_gguf: Path) -> None:
    """In float32 on the CPU also the copy of tied embeddings, 49,152 x 576, that the output layer gets."""
    found = {
        dtype: HfBackend().estimate(_source(smollm2_gguf), HfOptions(device="cpu", dtype=dtype, context=100, slots=1))
        for dtype in ("float32", "bfloat16")
    }
    num_weights, per_token = 134_515_008, 2 * 30 * 3 * 64

    assert found["float32"].weights_bytes == 4 * (num_weights + 49_152 * 576)
    assert found["bfloat16"].weights_bytes == 2 * num_weights
    assert [one.kv_bytes_per_token for one in found.values()] == [4 * per_token, 2 * per_token]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_estimate_counts_the_output_layer_of_tied_embeddings(
    tiny_model: TinyModel, tmp_path: Path, device: str
) -> None:
    folders = [
        changed_folder(tiny_model("llama"), tmp_path / str(is_tied), tie_word_embeddings=is_tied)
        for is_tied in (True, False)
    ]
    config = json.loads((folders[0] / "config.json").read_text())
    tied, plain = (
        HfBackend().estimate(_source(folder), HfOptions(device=device, dtype="float32", context=64))
        for folder in folders
    )
    copied = 4 * config["vocab_size"] * config["hidden_size"] if device == "cpu" else 0

    assert tied.weights_bytes - plain.weights_bytes == tied.total_bytes - plain.total_bytes == copied


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", (4, 3, 2)), ("float32", (8, 5, 2))])
def test_estimate_counts_keys_and_values_in_their_type(
    tiny_model: TinyModel, dtype: str, sizes: tuple[int, ...]
) -> None:
    types: list[dict[str, object]] = [{}, {"type_k": "fp8"}, {"type_k": "fp8", "type_v": "fp8"}]
    found = [
        HfBackend().estimate(
            _source(tiny_model("llama")), HfOptions(device="cuda:0", dtype=dtype, cache_tokens=100, **one)
        )  # type: ignore[arg-type]
        for one in types
    ]
    unit = found[2].kv_bytes_per_token // 2

    assert [one.kv_bytes_per_token for one in found] == [size * unit for size in sizes]
    assert [one.total_bytes - one.weights_bytes for one in found] == [100 * size * unit for size in sizes]


@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_8_bits_for_keys_and_values_are_refused_on_the_cpu(tiny_model: TinyModel, name: str) -> None:
    with pytest.raises(ModelLoadError, match=f'{name} = "fp8" is for one NVIDIA GPU'):
        _open(tiny_model("llama"), **{name: "fp8"})


def test_options_are_checked() -> None:
    for wrong in ({"slots": 0}, {"context": 1}, {"threads": 0}, {"max_batch_tokens": 0}, {"checkpoints": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HfOptions(**wrong)


def test_poolers_have_defaults_of_their_own_on_a_gpu() -> None:
    """float16 unless the model's files state bfloat16, and larger passes."""
    plain = Recipe(task="embed", transformer=Path(), config={"torch_dtype": "float32"})
    brain = Recipe(task="embed", transformer=Path(), config={"dtype": "bfloat16"})
    options = [HfOptions().resolved("cuda:0", recipe) for recipe in (plain, brain)] + [
        HfOptions().resolved("cpu", brain)
    ]

    assert [one.dtype for one in options] == ["float16", "bfloat16", "float32"]
    assert [one.max_batch_tokens for one in options] == [32768, 32768, 2048]


def test_defaults_depend_on_the_device() -> None:
    on_cpu, on_gpu = HfOptions().resolved("cpu"), HfOptions().resolved("cuda:0")
    asked = HfOptions(device="cpu", dtype="float16", max_batch_tokens=7).resolved("cuda:0")

    assert (on_cpu.device, on_cpu.dtype, on_cpu.max_batch_tokens) == ("cpu", "float32", 2048)
    assert (on_gpu.device, on_gpu.dtype, on_gpu.max_batch_tokens) == ("cuda:0", "bfloat16", 8192)
    assert (asked.device, asked.dtype, asked.max_batch_tokens) == ("cpu", "float16", 7)


def test_a_gpu_that_is_not_there_is_a_load_error(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="finds no CUDA device"):
        HfBackend().open(_source(tiny_model("llama")), HfOptions(device="cuda:0"), lambda _share, _what: None)


@pytest.mark.parametrize("quantization", ["bitsandbytes-8bit", "torchao-int8"])
def test_quantization_names_the_package_it_needs(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    package = quantization.split("-", maxsplit=1)[0]
    monkeypatch.setattr("enginehouse_hf.weights.find_spec", lambda _name: None)
    with pytest.raises(ModelLoadError, match=f"needs the package {package}; run: pip install {package}"):
        _open(tiny_model("llama"), quantization=quantization)


def test_random_weights_need_a_configuration_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "shape")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        _open(folder)
    runner = _open(folder, random_weights=True)

    assert runner.info.metadata["architecture"] == "llama"  # type: ignore[attr-defined]


def test_device_map_is_passed_on(tiny_model: TinyModel) -> None:
    runner = _open(tiny_model("llama"), device_map="cpu")

    assert runner.info.metadata["device"] == "cpu"  # type: ignore[attr-defined]
    assert runner.info.metadata["layers"] == "transformers layers, step by step"  # type: ignore[attr-defined]


def test_broken_sources_are_load_errors(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Beside those of the contract."""
    llama = tiny_model("llama")
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(100))
    no_tokenizer = changed_folder(llama, tmp_path / "no_tokenizer")
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    for path in (garbage, no_tokenizer):
        with pytest.raises(ModelLoadError):
            _open(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "not causal"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_attention_that_would_be_wrong_is_refused(
    tiny_model: TinyModel, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    name = "gemma3" if "model_type" in changes else "llama"
    with pytest.raises(ModelLoadError, match=reason):
        _open(changed_folder(tiny_model(name), tmp_path / "model", **changes))


def test_models_of_one_process_are_loaded_one_after_the_other(tiny_model: TinyModel) -> None:
    """Transformers changes the whole process while it builds a model: torch's default dtype, for one."""
    path, order = tiny_model("llama"), []

    def load(name: str) -> None:
        def note(share: float, what: str) -> None:
            order.append(name)

        HfBackend().open(_source(path), HfOptions(threads=1, device="cpu", dtype="bfloat16"), note).close()

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(load, name) for name in "abcd"]:
            one.result()

    assert len(order) > 8 and [name for name, _ in itertools.groupby(order)] == list(dict.fromkeys(order))
    assert torch.get_default_dtype() == torch.float32
