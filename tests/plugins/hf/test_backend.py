"""The hf backend without a model: what it registers, what it matches, and how it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import Backend, ModelSource, Runner
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_hf.backend import HfBackend, HfOptions

pytestmark = pytest.mark.hf

TinyModel = Callable[[str], Path]

_IMPORT_ONLY = """
import sys
import enginehouse_hf
backends = []
enginehouse_hf.register_backends(backends.append)
assert backends[0].probe().available
heavy = {"torch", "transformers", "gguf", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
_WITHOUT = """
import sys
from pathlib import Path
sys.modules[sys.argv[1]] = None
from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import MissingDependency
from enginehouse_hf.backend import HfBackend, HfOptions
try:
    path = Path(sys.argv[2])
    HfBackend().open(ModelSource(str(path), path), HfOptions(), lambda share, what: None)
except MissingDependency as error:
    print(HfBackend().probe().available, error.message)
"""


def _source(path: Path) -> ModelSource:
    return ModelSource(str(path), path)


def _open(path: Path, **options: object) -> Runner:
    return HfBackend().open(_source(path), HfOptions(threads=1, device="cpu", **options), lambda _share, _what: None)  # type: ignore[arg-type]


def _changed(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder with other configuration values."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_hook_register_backends_gives_one_backend() -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("hf",)))

    assert list(registry.backends) == ["hf"]
    assert isinstance(registry.backends["hf"], Backend)
    assert not [record.problem for record in registry.plugins if record.problem]


def test_importing_the_plugin_imports_no_library(python: Callable[..., str]) -> None:
    python(_IMPORT_ONLY)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_open_names_the_extra_when_a_library_is_missing(
    python: Callable[..., str], tiny_model: TinyModel, package: str
) -> None:
    output = python(_WITHOUT, package, str(tiny_model("llama")))

    assert output.strip() == f"False {MissingDependency(package, 'hf').message}"


def test_match_prefers_folders_to_gguf_files(tiny_model: TinyModel, smollm2_gguf: Path, tmp_path: Path) -> None:
    backend = HfBackend()
    folder, gguf = backend.match(_source(tiny_model("llama"))), backend.match(_source(smollm2_gguf))
    quantized = _changed(tiny_model("llama"), tmp_path / "mlx", quantization={"bits": 4})

    assert folder.score > gguf.score > 0
    assert backend.match(_source(quantized)).score == 0
    assert backend.match(_source(tmp_path)).score == 0
    assert backend.match(ModelSource("org/model")).score == 0


def test_estimate_counts_weights_and_kv(tiny_model: TinyModel, smollm2_gguf: Path) -> None:
    folder = tiny_model("llama")
    size = (folder / "model.safetensors").stat().st_size
    tiny = HfBackend().estimate(_source(folder), HfOptions(device="cpu", context=100, slots=3))
    halved = HfBackend().estimate(_source(folder), HfOptions(device="cpu", dtype="bfloat16"))
    gguf = HfBackend().estimate(_source(smollm2_gguf), HfOptions(device="cpu", context=100, slots=1))

    assert (tiny.weights_bytes, tiny.kv_bytes_per_token) == (size, 2 * 2 * 2 * 16 * 4)
    assert tiny.total_bytes == size + 300 * tiny.kv_bytes_per_token
    assert (halved.weights_bytes, halved.kv_bytes_per_token) == (size // 2, tiny.kv_bytes_per_token // 2)
    assert (gguf.weights_bytes, gguf.kv_bytes_per_token) == (134_515_008 * 4, 2 * 30 * 3 * 64 * 4)


def test_options_are_checked() -> None:
    for wrong in ({"slots": 0}, {"context": 1}, {"threads": 0}, {"max_batch_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HfOptions(**wrong)


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
    monkeypatch.setattr("enginehouse_hf.loader.find_spec", lambda _name: None)
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


def test_progress_rises_to_one(tiny_model: TinyModel) -> None:
    shares: list[float] = []
    options = HfOptions(threads=1, device="cpu")
    HfBackend().open(_source(tiny_model("llama")), options, lambda share, _: shares.append(share)).close()

    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_context_beyond_the_model_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="context = 513 is more than this model supports \\(512\\)"):
        _open(tiny_model("llama"), context=513)


def test_broken_sources_are_load_errors(tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers raises a different error for each; all are ours."""
    llama = tiny_model("llama")
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(100))
    no_tokenizer = _changed(llama, tmp_path / "no_tokenizer")
    for file in no_tokenizer.glob("*token*"):
        file.unlink()
    no_weights = _changed(llama, tmp_path / "no_weights")
    (no_weights / "model.safetensors").write_bytes(b"no safetensors")
    bad_json = _changed(llama, tmp_path / "bad_json")
    (bad_json / "config.json").write_text("{")
    unknown = _changed(llama, tmp_path / "unknown", model_type="no_such_model")
    sources = [garbage, no_tokenizer, no_weights, bad_json, unknown, tmp_path / "missing", tmp_path]
    for path in sources:
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
        _open(_changed(tiny_model(name), tmp_path / "model", **changes))


def test_a_model_recommends_what_its_generation_config_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = _changed(tiny_model("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    runner = _open(folder, context=64)
    try:
        assert runner.info.generation_defaults == {"temperature": 0.6, "top_k": 20}
        assert runner.info.metadata["library"].startswith("transformers ")
    finally:
        runner.close()
