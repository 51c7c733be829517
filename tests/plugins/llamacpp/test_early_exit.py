"""llama.cpp computes a whole graph at once, so a policy of early exit is refused with the reason, never simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.contract.errors import ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import open_engine, plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import ExitPolicySettings

pytestmark = pytest.mark.llamacpp


async def test_a_model_with_a_policy_is_refused_while_it_loads(smollm2_gguf: Path) -> None:
    policy = ExitPolicySettings(name="margin")
    model = ModelSettings(
        source=str(smollm2_gguf), backend="llamacpp", context=64, slots=1, isolation="thread", exit_policy=policy
    )
    plan = plan_model("m", model, PluginRegistry.load(PluginsSettings()))
    with pytest.raises(
        ModelLoadError, match=r"models\.m\.exit_policy: the backend 'llamacpp' has no access to the layers"
    ):
        await open_engine(plan, model, Settings(models={"m": model}), lambda share, what: None)
