"""Settings of drafters that are about a second model, on a backend that leaves its layers by itself."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.model_parts import DrafterPlan
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse.settings.optimisations import DrafterSettings


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
    ],
)
def test_settings_that_cannot_act_are_refused(registry: PluginRegistry, drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m\.drafters\[0\]\.{message}"):
        planned(registry, drafter)
