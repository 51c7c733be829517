"""Early exit: logits of the layer that was left; keys and values above it from the state there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse_testkit.leaving_contract import AfterLeaving, LeavingContract

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

RandomModel = Callable[[str], Path]


class TestLeaving(LeavingContract):
    """Against transformers alone, in each way in which the plugin runs a model."""

    num_token_ids = 150
    refusal = r"layers of this model are .*built in an unknown way"

    @pytest.fixture(params=["qwen3", "mistral", "gemma3_text", "phi", "gpt_neox", "qwen3_moe", "olmo2"])
    def family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(params=["qwen3", "mistral", "gemma3_text", "phi", "gpt_neox"])
    def compared_family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(params=["qwen3", "gemma3_text", "mixtral"])
    def batched_family(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def logits_after_leaving(self, random_model: RandomModel) -> AfterLeaving:
        from transformers import AutoModelForCausalLM

        def logits(family: str, token_ids: np.ndarray, stays: Sequence[int], left_at: int) -> np.ndarray:
            folder = random_model(family)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

            def keep(_module: Any, inputs: Any, output: Any) -> Any:
                states = output[0] if isinstance(output, tuple) else output
                states = states.clone()
                states[:, stays] = inputs[0][:, stays]
                return (states, *output[1:]) if isinstance(output, tuple) else states

            for layer in model.base_model.layers[left_at:]:
                layer.register_forward_hook(keep)
            with torch.no_grad():
                rows: np.ndarray = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, -1:].numpy()
            return rows

        return logits
