"""Model folders are recognised and measured from their files alone."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import MemoryEstimate, ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.model_folder import (
    DEFAULT_CONTEXT,
    ModelFolder,
    check_weights,
    recommended_parameters,
    served_context,
)

_CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}


def _folder(path: Path, config: object, weights_bytes: int = 1000) -> ModelSource:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(bytes(weights_bytes))
    return ModelSource(str(path), path)


def _found(path: Path, config: dict[str, Any], weights_bytes: int = 1000) -> ModelFolder:
    folder = ModelFolder.find(_folder(path, config, weights_bytes))
    assert folder is not None
    return folder


def test_find_needs_a_configuration_and_weights(tmp_path: Path) -> None:
    source = _folder(tmp_path / "model", _CONFIG)
    folder = ModelFolder.find(source)
    assert folder is not None and folder.config == _CONFIG

    assert source.path is not None
    (source.path / "model.safetensors").unlink()
    for other in (source, ModelSource("org/name"), ModelSource("gone", tmp_path / "gone")):
        assert ModelFolder.find(other) is None


@pytest.mark.parametrize("text", ["{", "[]", '"text"'])
def test_find_refuses_a_broken_configuration(tmp_path: Path, text: str) -> None:
    source = _folder(tmp_path / "model", {})
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelFolder.find(source)


def test_estimate_counts_the_dtype_in_use(tmp_path: Path) -> None:
    folder = _found(tmp_path / "model", _CONFIG)
    stored, widened = folder.estimate(10, None), folder.estimate(10, "float32")

    assert (stored.weights_bytes, stored.kv_bytes_per_token) == (1000, 2 * 3 * 2 * 8 * 2)
    assert (widened.weights_bytes, widened.kv_bytes_per_token) == (2000, 2 * 3 * 2 * 8 * 4)
    assert widened.total_bytes == 2000 + 10 * widened.kv_bytes_per_token


def test_estimate_reads_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    folder = _found(tmp_path / "model", {"text_config": {**_CONFIG, "head_dim": 16}})

    assert folder.estimate(0, None).kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


def test_estimate_of_text_parts_as_published(tmp_path: Path) -> None:
    """Gemma 3 and LLaVA leave out sizes that are defaults, and name the data type once, for the whole model."""
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    for number, (text, per_token) in enumerate(
        [(gemma, 2 * 34 * 4 * 256 * 4), ({"model_type": "llama"}, 2 * 32 * 4096 * 4)]
    ):
        folder = _found(tmp_path / str(number), {"text_config": text, "torch_dtype": "bfloat16"})
        assert folder.estimate(0, "float32") == MemoryEstimate(2000, per_token, 2000)


def test_estimate_of_packed_weights_is_their_size(tmp_path: Path) -> None:
    folder = _found(tmp_path / "model", {**_CONFIG, "quantization": {"bits": 4}})

    assert folder.is_mlx_quantized
    assert folder.estimate(0, "float32").weights_bytes == 1000


def test_estimate_without_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads"):
        _found(tmp_path / "model", {}).estimate(1, None)


def test_served_context_is_at_most_what_the_model_supports() -> None:
    assert served_context({}, None) == DEFAULT_CONTEXT
    assert served_context({"max_position_embeddings": 512}, None) == 512
    assert served_context({"max_position_embeddings": 100_000}, None) == DEFAULT_CONTEXT
    assert served_context({"max_position_embeddings": 100_000}, 100_000) == 100_000
    assert served_context({"text_config": {"max_position_embeddings": 512}}, None) == 512
    with pytest.raises(ModelLoadError, match=r"context = 513 is more than this model supports \(512\)"):
        served_context({"max_position_embeddings": 512}, 513)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_served_context_stays_where_positions_do_not_depend_on_the_batch(key: str) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 1024}

    assert served_context({"max_position_embeddings": 100_000, key: rope}, None) == 1024


@pytest.mark.parametrize(
    ("config", "recommended"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "top_k": None, "max_new_tokens": 9, "eos_token_id": 2}, {"temperature": 0.6}),
        # Drawing is off, so its values mean nothing; the penalty holds all the same.
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({}, {}),
        ([], {}),
    ],
)
def test_recommended_parameters_are_read_from_the_generation_config(
    tmp_path: Path, config: object, recommended: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    assert recommended_parameters(tmp_path) == recommended


def test_a_missing_or_broken_generation_config_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_parameters(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert recommended_parameters(tmp_path) == {}


_HOSTILE = {
    "text_times_layers": {"head_dim": "a", "num_hidden_layers": 400_000_000},
    "list_times_layers": {"head_dim": [0], "num_hidden_layers": 400_000_000},
    "text_as_layers": {"num_hidden_layers": "a" * 1000, "head_dim": 400_000_000},
    "text_as_heads": {"num_key_value_heads": "a", "head_dim": 10**9},
    "many_layers": {"num_hidden_layers": 10**6},
    "huge": {"hidden_size": 10**4000},
    "negative": {"num_hidden_layers": -1},
    "true": {"num_hidden_layers": True},
    "float": {"head_dim": 64.0},
    "not_a_number": {"head_dim": float("nan")},
    "infinite": {"hidden_size": float("inf")},
    "no_heads": {"num_attention_heads": 0, "hidden_size": 64},
    "object": {"num_attention_heads": {"a": 1}},
}


@pytest.mark.parametrize("sizes", _HOSTILE.values(), ids=_HOSTILE)
@pytest.mark.parametrize("is_nested", [False, True])
def test_sizes_are_checked_before_use(tmp_path: Path, sizes: dict[str, Any], is_nested: bool) -> None:
    config = {**_CONFIG, **sizes}
    source = _folder(tmp_path / "model", {"text_config": config} if is_nested else config)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            ModelFolder.find(source).estimate(10_000, None)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 400_000_000},
        {"n_layer": 400_000_000},
        {"num_local_experts": 10**6},
        {"num_hidden_layers": 9_000, "num_experts": 9_000},
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_folder_of_more_modules_than_any_model_has_is_not_opened(
    tmp_path: Path, sizes: dict[str, Any], is_nested: bool
) -> None:
    """Libraries create them all before they look for the weights."""
    config = {**_CONFIG, **sizes}
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelFolder.find(_folder(tmp_path / "model", {"text_config": config} if is_nested else config))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", " " * (5 * 2**20)])
def test_find_refuses_what_has_no_measure(tmp_path: Path, text: str) -> None:
    source = _folder(tmp_path / "model", {})
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelFolder.find(source)


@pytest.mark.parametrize(("name", "num_bytes"), [("tokenizer.json", 2**28), ("x.json", 2**27), ("a.jinja", 2**23)])
@pytest.mark.parametrize("folder", [".", "additional_chat_templates"])
def test_settings_files_have_a_size(tmp_path: Path, name: str, num_bytes: int, folder: str) -> None:
    source = _folder(tmp_path / "model", _CONFIG)
    path = tmp_path / "model" / folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)  # costs no disk
    with pytest.raises(ModelLoadError, match=name):
        ModelFolder.find(source)


@pytest.mark.parametrize("value", ["a", True, None, float("nan"), float("inf"), 10**100, [0.5], {"a": 1}])
def test_recommendations_are_numbers(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value, "top_p": 0.9}))

    assert recommended_parameters(tmp_path) == {"top_p": 0.9}


def test_recommendations_of_a_deep_file_are_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[" * 200_000)

    assert recommended_parameters(tmp_path) == {}


@pytest.mark.parametrize("value", ["a" * 100, True, [1], float("nan"), float("inf"), -5, {"a": 1}])
@pytest.mark.parametrize("key", ["max_position_embeddings", "rope"])
def test_a_context_is_a_number_of_tokens(value: Any, key: str) -> None:
    rope = {"rope_type": "dynamic", "original_max_position_embeddings": value}
    with pytest.raises(ModelLoadError, match="number of tokens"):
        served_context({"rope_scaling": rope} if key == "rope" else {key: value}, None)


@pytest.mark.parametrize("config", [{"rope_scaling": 5}, {"rope_scaling": ["dynamic"]}, {"text_config": 5}])
def test_rotary_settings_of_another_type_say_nothing(config: dict[str, Any]) -> None:
    assert served_context(config, None) == DEFAULT_CONTEXT


def test_headers_of_weights_have_a_size(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for num_bytes in (0, 2, 16 * 2**20):
        file.write_bytes(num_bytes.to_bytes(8, "little") + b"{}")
        check_weights(tmp_path)
    for num_bytes in (2**24 + 1, 90_000_000, 2**63):
        file.write_bytes(num_bytes.to_bytes(8, "little") + b"{}")
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            check_weights(tmp_path)
