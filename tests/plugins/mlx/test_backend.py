"""The mlx backend without a model: what it registers, what it matches, and how it fails."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import Backend, ModelSource, Runner
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_mlx.backend import MlxBackend, MlxOptions

pytestmark = pytest.mark.mlx

TinyModel = Callable[[str], Path]

_IMPORT_ONLY = """
import sys
import enginehouse_mlx
backends = []
enginehouse_mlx.register_backends(backends.append)
assert backends[0].probe().available
heavy = {"mlx", "mlx_lm", "transformers", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
_WITHOUT = """
import sys
from pathlib import Path
sys.modules["mlx_lm"] = None
from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import MissingDependency
from enginehouse_mlx.backend import MlxBackend, MlxOptions
try:
    path = Path(sys.argv[1])
    MlxBackend().open(ModelSource(str(path), path), MlxOptions(), lambda share, what: None)
except MissingDependency as error:
    print(MlxBackend().probe().available, error.fields["extra"])
"""


def _source(path: Path) -> ModelSource:
    return ModelSource(str(path), path)


def _open(path: Path, options: MlxOptions | None = None) -> Runner:
    runner = MlxBackend().open(_source(path), options or MlxOptions(), lambda _share, _what: None)
    assert isinstance(runner, Runner)
    return runner


def _changed(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of a model folder with other configuration values."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_hook_register_backends_gives_one_backend() -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("mlx",)))

    assert list(registry.backends) == ["mlx"]
    assert isinstance(registry.backends["mlx"], Backend)
    assert not [record.problem for record in registry.plugins if record.problem]


def test_importing_the_plugin_imports_no_library(python: Callable[..., str]) -> None:
    python(_IMPORT_ONLY)


def test_open_names_the_extra_when_a_library_is_missing(python: Callable[..., str], tiny_model: TinyModel) -> None:
    assert python(_WITHOUT, str(tiny_model("llama"))).split() == ["False", MissingDependency("x", "mlx").extra]


def test_match_is_made_for_folders_that_mlx_quantized(tiny_model: TinyModel, tmp_path: Path) -> None:
    backend = MlxBackend()
    quantized = _changed(tiny_model("llama"), tmp_path / "quantized", quantization={"bits": 4, "group_size": 64})
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    assert backend.match(_source(quantized)).score == 1
    assert backend.match(_source(tiny_model("llama"))).score == (0.9 if sys.platform == "darwin" else 0.5)
    assert backend.match(_source(gguf)).score == 0
    assert backend.match(ModelSource("org/model")).score == 0


def test_estimate_counts_weights_and_kv(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    size = (folder / "model.safetensors").stat().st_size
    stored = MlxBackend().estimate(_source(folder), MlxOptions(context=100, slots=3))
    halved = MlxBackend().estimate(_source(folder), MlxOptions(dtype="float16"))

    assert (stored.weights_bytes, stored.kv_bytes_per_token) == (size, 2 * 2 * 2 * 16 * 4)
    assert stored.total_bytes == size + 300 * stored.kv_bytes_per_token
    assert (halved.weights_bytes, halved.kv_bytes_per_token) == (size // 2, stored.kv_bytes_per_token // 2)
    with pytest.raises(ModelLoadError):
        MlxBackend().estimate(_source(tmp_path), MlxOptions())


def test_progress_rises_to_one(tiny_model: TinyModel) -> None:
    shares: list[float] = []
    MlxBackend().open(_source(tiny_model("llama")), MlxOptions(), lambda share, _: shares.append(share)).close()

    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_context_beyond_the_model_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelLoadError, match="context = 513 is more than this model supports \\(512\\)"):
        _open(tiny_model("llama"), MlxOptions(context=513))


def test_context_ends_where_mlx_lm_would_be_wrong(tiny_model: TinyModel) -> None:
    """mlx-lm's Gemma 2 has no sliding window; up to the window's length that makes no difference."""
    runner = _open(tiny_model("gemma2"))
    assert runner.capabilities.max_context == 8
    runner.close()
    with pytest.raises(ModelLoadError, match="context = 9"):
        _open(tiny_model("gemma2"), MlxOptions(context=9))


def test_broken_sources_are_load_errors(tiny_model: TinyModel, tmp_path: Path) -> None:
    """mlx-lm raises a different error for each; all are ours."""
    llama = tiny_model("llama")
    no_weights = _changed(llama, tmp_path / "no_weights")
    (no_weights / "model.safetensors").write_bytes(b"no safetensors")
    bad_json = _changed(llama, tmp_path / "bad_json")
    (bad_json / "config.json").write_text("{")
    unknown = _changed(llama, tmp_path / "unknown", model_type="no_such_model")
    other_shape = _changed(llama, tmp_path / "other_shape", num_hidden_layers=3)
    for path in (no_weights, bad_json, unknown, other_shape, tmp_path / "missing", tmp_path):
        with pytest.raises(ModelLoadError):
            _open(path)


def test_low_precision_weights_are_served_as_float32_rows(tiny_model: TinyModel) -> None:
    import numpy as np

    from enginehouse.contract.backend import Span

    runner = _open(tiny_model("llama"), MlxOptions(dtype="bfloat16", context=64))
    sequence = runner.open_sequence()
    rows = runner.forward([Span(sequence, 0, np.arange(5, dtype=np.int32), "all")]).host()

    assert (rows.dtype, rows.shape) == (np.float32, (5, runner.info.vocab_size))
    assert rows.flags.writeable
    runner.close()


def test_models_with_a_soft_cap_are_not_cut(tiny_model: TinyModel) -> None:
    """Cutting off the vocabulary projection would lose what comes after it; the numbers at load say so."""
    from mlx_lm import load

    from enginehouse_mlx.halves import cut_model

    capped, _ = load(str(tiny_model("gemma2")))
    plain, _ = load(str(tiny_model("qwen3")))

    assert cut_model(capped)[0].body is capped
    assert cut_model(plain)[0].body is plain.model
    assert cut_model(plain)[0].can_batch


def test_a_model_recommends_what_its_generation_config_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = _changed(tiny_model("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    runner = _open(folder, MlxOptions(context=64))
    try:
        assert runner.info.generation_defaults == {"temperature": 0.6, "top_k": 20}
        assert runner.info.metadata["library"].startswith("mlx-lm ")
    finally:
        runner.close()
