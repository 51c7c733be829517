"""Models with recurrent layers: greedy text of ``model.generate``, whatever shares a pass and however prompts are split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse_hf.backend import HfBackend, HfOptions

pytestmark = pytest.mark.hf

RandomModel = Callable[[str], Path]
Greedy = Callable[..., list[list[int]]]

_TEXTS = (
    "The capital of France is",
    "def add(left, right):\n    return",
    "Once upon a time, in a land of mountains and stops, a small engine",
    "1, 2, 3, 4,",
)


def _open(path: Path, **options: Any) -> Runner:
    settings = HfOptions(**{"device": "cpu", "threads": 1, "slots": 4, "context": 128, **options})
    runner = HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)
    assert isinstance(runner, Runner)
    return runner


def _generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers itself generates, prompt by prompt, with its own attention and caches."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "qwen3_5_text",
        "mamba2",
        "mamba",
        "bamba",
        "granitemoehybrid",
        "nemotron_h",
        "zamba2",
        "falcon_h1",
        "lfm2",
        "jamba",
        "olmo_hybrid",
    ],
)
def test_greedy_equals_generate_alone_batched_and_chunked(random_model: RandomModel, greedy: Greedy, name: str) -> None:
    runner = _open(random_model(name))
    prompts = [runner.tokenizer.encode(text, False) for text in _TEXTS]
    expected = _generate(random_model(name), prompts, 12)

    assert [greedy(runner, [prompt], 12, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 12, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 12, chunk_tokens=5) == expected
    assert len({tuple(answer) for answer in expected}) > 2  # the models do say different things
    runner.close()
