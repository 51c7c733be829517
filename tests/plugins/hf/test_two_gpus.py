"""A model that accelerate spreads over two GPUs (``device_map``): the contract, and greedy text of ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.contract.device_draws import prompts_of
from enginehouse_testkit.runner_contract import RunnerContract

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

TinyModel = Callable[[str], Path]
Greedy = Callable[..., list[list[int]]]


def _open(path: Path, **options: Any) -> Any:
    settings = HfOptions(**{"device_map": "balanced", "dtype": "float32", "slots": 4, "context": 128, **options})
    return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


class TestSpread(RunnerContract):
    max_logit_difference = 1e-3

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls, tiny_model: TinyModel) -> Callable[[], Runner]:
        path = tiny_model("llama")
        return lambda: _open(path, context=64)  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_greedy_of_a_spread_model_equals_generate(tiny_model: TinyModel, greedy: Greedy, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(architecture)
    runner = _open(folder)
    prompts = prompts_of(runner)
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    alone.generation_config.eos_token_id = None

    answers = greedy(runner, prompts, 24, chunk_tokens=5)

    assert torch.cuda.memory_allocated(1) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        whole = alone.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert whole[0, len(prompt) :].tolist() == answer
    runner.close()
