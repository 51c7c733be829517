"""Which settings of the disk tier are refused, and where each model's files lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.contract.types import EngineSettings
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import ModelPlan, open_engine, plan_model
from enginehouse.settings.config import ModelSettings, Settings, load_settings
from enginehouse.workers.messages import Load
from enginehouse.workers.parts import model_digest


def plan(name: str = "m", **fields: Any) -> tuple[ModelPlan, ModelSettings, Settings]:
    model = ModelSettings(source="fake", backend="fake", isolation="thread", **fields)
    settings = Settings(models={name: model})
    return plan_model(name, model, PluginRegistry.for_settings(settings)), model, settings


def load(**fields: Any) -> Load:
    usual: dict[str, Any] = {"backend": "b", "source_text": "t", "source_path": None, "options": {}}
    settings = Settings()
    return Load(**{**usual, **fields}, options_path="models.m", engine=EngineSettings(), plugins=settings.plugins)


def test_nothing_is_saved_unless_asked_for() -> None:
    assert plan()[0].prefix_disk is None


def test_each_model_has_a_folder_of_its_own(tmp_path: Path) -> None:
    found = [plan(name, prefix_cache_dir=str(tmp_path))[0].prefix_disk for name in ("a/b", "a%2Fb", "..")]
    folders = [Path(one.folder) for one in found if one is not None]

    assert len(set(folders)) == 3
    assert [folder.resolve().parent for folder in folders] == [tmp_path.resolve()] * 3


def test_a_cache_that_is_off_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.prefix_cache_dir: there is nothing to save"):
        plan(prefix_cache=False, prefix_cache_dir=str(tmp_path))


def test_a_backend_that_hands_requests_on_has_nothing_to_save(tmp_path: Path) -> None:
    model = ModelSettings(source="http://127.0.0.1:1/v1", backend="remote", prefix_cache_dir=str(tmp_path))
    registry = PluginRegistry.for_settings(Settings(models={"m": model}))
    with pytest.raises(ConfigError, match="forwards requests"):
        plan_model("m", model, registry)


async def test_a_runner_that_cannot_save_refuses_the_setting(tmp_path: Path) -> None:
    planned, model, settings = plan(prefix_cache_dir=str(tmp_path), options={"states": False})
    with pytest.raises(ModelLoadError, match="'fake' cannot save sequences"):
        await open_engine(planned, model, settings, lambda share, text: None)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    planned, model, settings = plan(prefix_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"models\.m\.prefix_cache_dir: .*file.* cannot be used"):
        await open_engine(planned, model, settings, lambda share, text: None)


def test_sizes_are_written_like_other_amounts(tmp_path: Path) -> None:
    path = tmp_path / "enginehouse.toml"
    text = '[models.m]\nsource = "fake"\nprefix_cache_dir = "saved"\nprefix_cache_disk = {}\n'
    path.write_text(text.format('"500MB"'))
    model = load_settings(path, {}).models["m"]
    assert model.prefix_cache_disk.num_bytes == 500_000_000
    assert model.prefix_cache_dir == str(tmp_path / "saved"), "beside the configuration file"
    path.write_text(text.format('"much"'))
    with pytest.raises(ConfigError, match="prefix_cache_disk"):
        load_settings(path, {})


def test_a_model_is_known_by_its_file(tmp_path: Path) -> None:
    """By its content at both ends, its size and its time; and by everything else that states depend on."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights" * 1000)
    usual = load(source_path=str(file))
    first = model_digest(usual, "format")

    assert first == model_digest(usual, "format")
    assert first != model_digest(usual, "another format")
    assert first != model_digest(load(source_path=str(file), backend="c"), "format")
    file.write_bytes(b"Weights" * 1000)
    assert first != model_digest(usual, "format")
    folder = model_digest(load(source_path=str(tmp_path)), "format")
    (tmp_path / "more.safetensors").write_bytes(b"x")
    assert folder != model_digest(load(source_path=str(tmp_path)), "format")
