"""The mlx runner computes what mlx-lm and transformers compute, whatever shares a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.config import older_keys

pytestmark = pytest.mark.mlx

Greedy = Callable[..., list[list[int]]]

_TEXTS = (
    "The capital of France is",
    "def add(left, right):\n    return",
    "Once upon a time, in a land of mountains and stops, a small engine",
    "1, 2, 3, 4,",
)
_FORCED = "The Seine rises in Burgundy, flows through Paris and meets the sea at Le Havre in 2024."
_TURN = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

_ARCHITECTURES = ("llama", "qwen3", "gemma3")

_HF_ROWS = """
import json, sys
from pathlib import Path
import numpy as np
from enginehouse.contract.backend import ModelSource, Span
from enginehouse_hf.backend import HfBackend, HfOptions
options = HfOptions(context=128, slots=1, threads=1)
rows = {}
for name, (folder, token_ids) in json.loads(sys.argv[1]).items():
    source = ModelSource(folder, Path(folder))
    runner = HfBackend().open(source, options, lambda share, what: None)
    span = Span(runner.open_sequence(), 0, np.array(token_ids, np.int32), "all")
    rows[name] = runner.forward([span]).host()
    runner.close()
np.savez(sys.argv[2], **rows)
"""


def _open(path: Path, **options: Any) -> Runner:
    runner = MlxBackend().open(ModelSource(str(path), path), MlxOptions(slots=4, **options), lambda _share, _what: None)
    assert isinstance(runner, Runner)
    return runner


def _generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What mlx-lm itself generates, prompt by prompt, with its own caches."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    config = json.loads((folder / "config.json").read_text())
    model, _ = load(str(folder), model_config=older_keys(config))
    answers = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens, prefill_step_size=5)
        answers.append([int(token) for token, _ in steps])
    return answers


def _rows(runner: Runner, token_ids: list[int]) -> np.ndarray:
    sequence = runner.open_sequence()
    rows = runner.forward([Span(sequence, 0, np.array(token_ids, np.int32), "all")]).host().copy()
    runner.free_sequence(sequence)
    return rows


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[[str], Path], smollm2_folder: Path) -> dict[str, Path]:
    return {"smollm2": smollm2_folder, **{name: tiny_model(name) for name in _ARCHITECTURES}}


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Iterator[Runner]:
    runner = _open(smollm2_folder, context=256)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def differences(
    folders: dict[str, Path], python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """The largest difference to the logits of the hf runner, which runs in a process of its own."""
    rows, work = {}, {}
    for name, folder in folders.items():
        runner = _open(folder, context=128)
        token_ids = runner.tokenizer.encode(_FORCED, False)
        rows[name], work[name] = _rows(runner, token_ids), (str(folder), token_ids)
        runner.close()
    file = tmp_path_factory.mktemp("hf") / "rows.npz"
    python(_HF_ROWS, json.dumps(work), str(file))
    with np.load(file) as expected:
        return {name: float(np.abs(rows[name] - expected[name]).max()) for name in folders}


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_greedy_equals_mlx_lm_alone_batched_and_chunked(
    folders: dict[str, Path], greedy: Greedy, architecture: str
) -> None:
    runner = _open(folders[architecture], context=128)
    prompts = [[*runner.tokenizer.prefix_token_ids, *runner.tokenizer.encode(text, False)] for text in _TEXTS]
    expected = _generate(folders[architecture], prompts, 24)

    assert [greedy(runner, [prompt], 24, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 24, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 24, chunk_tokens=5) == expected
    runner.close()


@pytest.mark.hf
@pytest.mark.timeout(400)  # the first one waits for SmolLM2 to be written and for a process with torch
@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_tiny_logits_equal_those_of_the_hf_runner(differences: dict[str, float], architecture: str) -> None:
    """The text is longer than the sliding window; the logits spread over several units."""
    assert differences[architecture] < 1e-3


@pytest.mark.hf
def test_smollm2_logits_equal_those_of_the_hf_runner(differences: dict[str, float]) -> None:
    assert differences["smollm2"] < 0.01


def test_smollm2_knows_the_capital_of_france(smollm2: Runner, greedy: Greedy) -> None:
    """Beside another sequence, so that decoding runs as a batch of unequal lengths."""
    prompts = [smollm2.tokenizer.encode(text, True) for text in (_TURN, _TEXTS[0])]
    answers = greedy(smollm2, prompts, 8, chunk_tokens=128)
    texts = [b"".join(smollm2.tokenizer.token_bytes[token_id] for token_id in answer) for answer in answers]

    assert all(b"Paris" in text for text in texts)
    assert answers[0][-1] in smollm2.tokenizer.end_token_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_text_is_that_of_mlx_lm(smollm2: Runner, smollm2_folder: Path, greedy: Greedy) -> None:
    prompts = [smollm2.tokenizer.encode(text, True) for text in (_TURN, *_TEXTS[:2])]

    assert greedy(smollm2, prompts, 16, chunk_tokens=7) == _generate(smollm2_folder, prompts, 16)
