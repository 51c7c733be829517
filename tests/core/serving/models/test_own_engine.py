"""Settings about workers are refused where a backend opens an engine of its own: they would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import ModelPlan, plan_model
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.optimisations import DrafterSettings


def plan(source: str, backend: str, **fields: Any) -> ModelPlan:
    model = ModelSettings(source=source, backend=backend, **fields)
    return plan_model("m", model, PluginRegistry.for_settings(Settings(models={"m": model})))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("prefill_chunk_tokens", 64),
        ("prefix_cache", False),
        ("isolation", "thread"),
        ("python", "/usr/bin/python3"),
        ("step_timeout_s", 5.0),
        ("replay", False),
        ("replay_timeout_s", 5.0),
        ("drafters", (DrafterSettings(name="prompt_lookup"),)),
        ("queue_timeout_s", 5.0),
    ],
)
def test_an_engine_of_its_own_has_no_worker(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m\.{setting}: the backend 'remote'"):
        plan("http://127.0.0.1:1/v1", "remote", **{setting: value})


def test_what_both_know_is_taken() -> None:
    assert plan("http://127.0.0.1:1/v1", "remote", slots=4, context=512).options["context"] == 512
    assert plan("fake", "fake", isolation="thread", prefix_cache=False, replay=False)
