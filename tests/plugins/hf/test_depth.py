"""Spans that run only the first layers: logits of the shorter model, and nothing reads what was never written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginehouse_testkit.depth_contract import DepthContract, FewerLayers

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

RandomModel = Callable[[str], Path]


class TestDepth(DepthContract):
    """Against transformers alone, in each way in which the plugin runs a model."""

    windowed = "mistral"
    num_token_ids = 150

    @pytest.fixture(params=["qwen3", "mistral", "gemma3_text", "phi", "qwen3_moe"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def logits_of_fewer(self, random_model: RandomModel, tmp_path: Path) -> FewerLayers:
        from transformers import AutoModelForCausalLM

        def logits(family: str, num_layers: int, token_ids: np.ndarray) -> np.ndarray:
            folder = _shortened(random_model(family), tmp_path / str(num_layers), num_layers)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                rows: np.ndarray = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0].numpy()
            return rows

        return logits


def _shortened(folder: Path, target: Path, num_layers: int) -> Path:
    """The same weights under a configuration with fewer layers."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config))
    return target
