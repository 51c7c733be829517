"""The mlx backend without a model: what it registers, what it matches, and how it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.settings.config import ModelSettings, Settings, structure_options
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.contract.model_folder import changed_folder
from enginehouse_testkit.served import served

pytestmark = pytest.mark.mlx

TinyModel = Callable[[str], Path]


def _source(path: Path) -> ModelSource:
    return ModelSource(str(path), path)


def _open(path: Path, options: MlxOptions | None = None) -> Runner:
    runner = MlxBackend().open(_source(path), options or MlxOptions(), lambda _share, _what: None)
    assert isinstance(runner, Runner)
    return runner


def test_match_is_made_for_folders_that_mlx_quantized(tiny_model: TinyModel, tmp_path: Path) -> None:
    backend = MlxBackend()
    quantized = changed_folder(tiny_model("llama"), tmp_path / "quantized", quantization={"bits": 4, "group_size": 64})
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    assert backend.match(_source(quantized)).score == 1
    assert backend.match(_source(tiny_model("llama"))).score == (0.9 if sys.platform == "darwin" else 0.5)
    assert backend.match(_source(gguf)).score == 0
    assert backend.match(ModelSource("org/model")).score == 0


def test_pooling_models_are_left_to_other_backends(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Also on a Mac, where this backend is preferred for other folders."""
    encoder = changed_folder(tiny_model("llama"), tmp_path / "encoder", architectures=["BertModel"])
    classifier = ["BertForSequenceClassification"]
    reranker = changed_folder(tiny_model("llama"), tmp_path / "reranker", architectures=classifier, num_labels=1)

    for folder, task in ((encoder, "embed"), (reranker, "rerank")):
        match = MlxBackend().match(_source(folder))
        assert match.score == 0
        assert match.reason.startswith(f"a model for {task}")
        with pytest.raises(ModelLoadError, match="use the backend hf"):
            _open(folder)


@pytest.mark.parametrize("name", ["slots", "max_batch_tokens", "checkpoints"])
def test_options_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        MlxOptions(**{name: 0})  # type: ignore[arg-type]


def test_a_model_that_reads_images_takes_text_only(tiny_model: TinyModel, tmp_path: Path) -> None:
    """mlx-lm has no vision towers; the reason is in the model's metadata, and a projector cannot be set."""
    runner = _open(changed_folder(tiny_model("llama"), tmp_path / "seeing", vision_config={"hidden_size": 8}))
    assert runner.capabilities.media == ()
    assert runner.info.metadata["images"].startswith("none: mlx-lm computes only the text part")
    runner.close()
    plain = _open(tiny_model("llama"))
    assert "images" not in plain.info.metadata
    plain.close()
    with pytest.raises(ConfigError, match=r"models\.x\.mmproj: unknown setting"):
        structure_options(MlxOptions, {"mmproj": "mmproj.gguf"}, "models.x")


def test_images_are_refused_by_name(tiny_model: TinyModel) -> None:
    settings = Settings(models={"x": ModelSettings(source=str(tiny_model("llama")), backend="mlx")})
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with served(settings, timeout=60) as client:
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == "messages[0].content[0]: this model takes text only, not image_url"


def test_estimate_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        MlxBackend().estimate(_source(tmp_path), MlxOptions())


def test_context_ends_where_mlx_lm_would_be_wrong(tiny_model: TinyModel) -> None:
    """mlx-lm's Gemma 2 has no sliding window; up to the window's length that makes no difference."""
    runner = _open(tiny_model("gemma2"))
    assert runner.capabilities.max_context == 8
    runner.close()
    with pytest.raises(ModelLoadError, match="context = 9"):
        _open(tiny_model("gemma2"), MlxOptions(context=9))


def test_weights_that_do_not_fit_the_configuration_are_a_load_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        _open(changed_folder(tiny_model("llama"), tmp_path / "other_shape", num_hidden_layers=3))


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
