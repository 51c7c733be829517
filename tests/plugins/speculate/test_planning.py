"""Settings of drafters that are about a second model or a head, on a backend that leaves its layers by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.drafter import BoundDrafter
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.model_parts import DrafterPlan
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse.settings.features import DrafterSettings
from enginehouse.workers.parts import bind_drafters
from enginehouse_testkit.fake_heads import FAKE_HEAD
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return PluginRegistry.load(PluginsSettings(allow=("speculate",)), builtin=["fake"])


def planned(registry: PluginRegistry, drafter: dict[str, Any]) -> DrafterPlan:
    settings = ModelSettings(source="fake", backend="fake", drafters=(DrafterSettings.read(drafter),))
    (plan,) = plan_model("m", settings, registry).drafters
    return plan


def test_layers_need_no_second_model_there(registry: PluginRegistry) -> None:
    plan = planned(registry, {"name": "layers", "num_layers": 3})

    assert plan.second is None
    assert plan.to_load().model is None


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            {"name": "layers", "settings": {"context": 64}},
            r"settings: the backend 'fake' opens no second model for 'layers'",
        ),
        ({"name": "layers", "source": "fake"}, r"source: 'layers' drafts with layers of the model itself"),
        ({"name": "draft-model", "settings": {"context": 64}}, r"settings: .* set 'source' to that model"),
        ({"name": "draft-model", "backend": "fake"}, r"backend: .* set 'source' to that model"),
        ({"name": "head", "backend": "fake"}, r"backend: the model's own backend opens the head"),
        ({"name": "head", "settings": {"context": 64}}, r"settings: the model's own backend opens the head"),
    ],
)
def test_settings_that_cannot_act_are_refused(registry: PluginRegistry, drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m\.drafters\[0\]\.{message}"):
        planned(registry, drafter)


def test_a_head_is_for_the_models_own_backend(registry: PluginRegistry, tmp_path: Path) -> None:
    (tmp_path / "head").write_text(FAKE_HEAD)
    plan = planned(registry, {"name": "head", "source": str(tmp_path / "head"), "max_tokens": 3})

    assert plan.second is not None and plan.second[1].name == "fake"
    load = plan.to_load()
    assert load.model is not None and load.model.source_path == str(tmp_path / "head")
    assert load.options == {"max_tokens": 3}
    assert planned(registry, {"name": "head"}).second is None


def test_a_head_that_is_not_there_is_refused(registry: PluginRegistry, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        planned(registry, {"name": "head", "source": str(tmp_path / "nowhere")})


def bound(tmp_path: Path, options: FakeOptions, **drafter: Any) -> Mapping[str, BoundDrafter]:
    """The drafter ``head``, as a worker binds it."""
    registry = PluginRegistry.load(PluginsSettings(allow=("speculate",)), builtin=["fake"])
    load = planned(registry, {"name": "head", **drafter}).to_load()
    return bind_drafters(registry, [load], FakeRunner(options), 4, lambda _share, _what: None)


def test_a_worker_gives_the_files_to_the_runner(tmp_path: Path) -> None:
    (tmp_path / "head").write_text(FAKE_HEAD)
    (tmp_path / "poem").write_text("no head")
    options = FakeOptions(draft_head=True)

    assert list(bound(tmp_path, options)) == ["head"]
    assert list(bound(tmp_path, options, source=str(tmp_path / "head"))) == ["head"]
    with pytest.raises(ModelLoadError, match=r"the drafter 'head': .*poem: not a head"):
        bound(tmp_path, options, source=str(tmp_path / "poem"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FakeOptions(), "the drafter 'head': this fake model has no draft head"),
        (FakeOptions(draft_head=True, window=8), "the drafter 'head': this fake model has no draft head"),
        (FakeOptions(draft_head=True, num_checkpoints=4), r"'head': .* without window or num_checkpoints"),
    ],
)
def test_a_model_that_cannot_have_a_head_says_why(tmp_path: Path, options: FakeOptions, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        bound(tmp_path, options)
