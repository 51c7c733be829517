"""Greedy text of the hf runner is that of ``model.generate``, whatever shares a forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.attention import KvMemory, Step, UnsupportedAttention, slot_attention
from enginehouse_hf.backend import HfBackend, HfOptions

pytestmark = pytest.mark.hf

Greedy = Callable[..., list[list[int]]]
Generate = Callable[[Path, list[list[int]], int], list[list[int]]]

_TEXTS = (
    "The capital of France is",
    "def add(left, right):\n    return",
    "Once upon a time, in a land of mountains and stops, a small engine",
    "1, 2, 3, 4,",
)
_MORE_TEXTS = (
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "import numpy as np\n\n",
    "Q: How many legs does a spider have?\nA:",
    "In 1969, people first walked on",
)
_TURN = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def _open(path: Path, **options: Any) -> Runner:
    settings = HfOptions(device="cpu", threads=1, slots=4, **options)
    runner = HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)
    assert isinstance(runner, Runner)
    return runner


def _reference_rows(folder: Path, token_ids: list[int]) -> np.ndarray:
    """(num_tokens, vocab_size) logits of transformers' own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        rows: np.ndarray = model(torch.tensor([token_ids])).logits[0].numpy()
    return rows


def _rows(runner: Runner, token_ids: list[int], chunk_tokens: int) -> np.ndarray:
    sequence, rows = runner.open_sequence(), []
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = np.array(token_ids[start : start + chunk_tokens], np.int32)
        rows.append(runner.forward([Span(sequence, start, chunk, "all")]).host())
    runner.free_sequence(sequence)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[Runner]:
    runner = _open(smollm2_gguf, context=256)
    yield runner
    runner.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_greedy_equals_generate_alone_batched_and_chunked(
    tiny_model: Callable[[str], Path], greedy: Greedy, architecture: str, generate: Generate
) -> None:
    folder = tiny_model(architecture)
    runner = _open(folder, context=128)
    prompts = [[*runner.tokenizer.prefix_token_ids, *runner.tokenizer.encode(text, False)] for text in _TEXTS]
    expected = generate(folder, prompts, 24)

    assert [greedy(runner, [prompt], 24, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(runner, prompts, 24, chunk_tokens=128) == expected
    assert greedy(runner, prompts, 24, chunk_tokens=5) == expected
    runner.close()


@pytest.mark.parametrize(
    "name",
    [
        "qwen2", "qwen3", "mistral", "gemma3", "gemma3_text", "phi", "phi3", "mixtral", "qwen3_moe", "olmo2",
        "gpt_neox", "gpt_oss",
    ],
)  # fmt: skip
def test_greedy_of_any_model_equals_generate(
    random_model: Callable[[str], Path], greedy: Greedy, name: str, generate: Generate
) -> None:
    """Windows of 8, rotary positions for half of each head, experts: alone, batched and in chunks of 5."""
    runner = _open(random_model(name), context=128)
    prompts = [runner.tokenizer.encode(text, False) for text in (*_TEXTS, *_MORE_TEXTS)]
    expected = generate(random_model(name), prompts, 12)

    assert [greedy(runner, [prompt], 12, chunk_tokens=128)[0] for prompt in prompts[:4]] == expected[:4]
    assert greedy(runner, prompts[:8], 12, chunk_tokens=128) == expected[:8]
    assert greedy(runner, prompts[2:], 12, chunk_tokens=5) == expected[2:]
    assert len({tuple(answer) for answer in expected}) > 5  # the models do say different things
    runner.close()


def test_greedy_after_going_back_equals_generate(
    random_model: Callable[[str], Path], greedy: Greedy, generate: Generate
) -> None:
    """A fork in the middle of an answer and a truncated sequence both continue as if nothing had followed."""
    runner = _open(random_model("gpt_oss"), context=128)
    prompt = runner.tokenizer.encode(_TEXTS[2], False)
    (expected,) = generate(random_model("gpt_oss"), [prompt], 24)
    whole = np.array(prompt + expected, np.int32)
    sequence, back = runner.open_sequence(), len(prompt) + 12
    runner.forward([Span(sequence, 0, whole, "none")])
    forked, kept = runner.fork(sequence, back)

    assert (kept, runner.truncate(sequence, back)) == (back, back)
    for one in (forked, sequence):
        row = runner.forward([Span(one, back, whole[back : back + 1])]).host()[0]
        rest = runner.forward([Span(one, back + 1, whole[back + 1 :], "all")]).host()
        assert [int(row.argmax()), *rest.argmax(1)][:11] == expected[13:]
    runner.close()


@pytest.mark.parametrize(("name", "reason"), [("minimax", "its own recurrence in some of its 4 layers")])
def test_a_model_that_cannot_run_packed_is_refused(random_model: Callable[[str], Path], name: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        _open(random_model(name), context=128)


def test_a_tensor_that_a_model_adds_to_its_attention_is_refused() -> None:
    """Such as sinks under another name, or a bias by position: without it the model would answer wrongly."""
    states, step = torch.zeros(1, 1, 1, 4), Step(KvMemory(1, 8), (), threading.Event())
    with pytest.raises(UnsupportedAttention, match="'position_bias'"):
        slot_attention(torch.nn.Module(), states, states, states, None, enginehouse_step=step, position_bias=states)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_logits_equal_those_of_transformers(tiny_model: Callable[[str], Path], architecture: str) -> None:
    """All positions of a text much longer than the sliding window, in one span and in chunks of 7."""
    runner = _open(tiny_model(architecture), context=256)
    token_ids = runner.tokenizer.encode("".join(_TEXTS), False)
    whole, chunked = _rows(runner, token_ids, len(token_ids)), _rows(runner, token_ids, 7)
    runner.close()
    expected = _reference_rows(tiny_model(architecture), token_ids)

    assert len(token_ids) > 40
    assert np.abs(whole - expected).max() < 1e-4
    assert np.abs(chunked - expected).max() < 1e-4


@pytest.mark.timeout(400)  # the first user of ``smollm2`` waits while two GGUF files are read in pure Python
@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(6, 6), pytest.param(10, 12, marks=pytest.mark.slow)])
def test_smollm2_equals_generate(
    *, smollm2: Runner, smollm2_folder: Path, greedy: Greedy, num_prompts: int, num_tokens: int, generate: Generate
) -> None:
    """The GGUF file through our attention against its float32 copy through transformers alone."""
    texts = (*_TEXTS, *_MORE_TEXTS)[:num_prompts]
    prompts = [smollm2.tokenizer.encode(text, False) for text in texts]
    expected = generate(smollm2_folder, prompts, num_tokens)

    assert [greedy(smollm2, [prompt], num_tokens, chunk_tokens=128)[0] for prompt in prompts] == expected
    assert greedy(smollm2, prompts[:-2], num_tokens, chunk_tokens=6) == expected[:-2]
    assert greedy(smollm2, prompts[2:], num_tokens, chunk_tokens=128) == expected[2:]


def test_smollm2_knows_the_capital_of_france(smollm2: Runner, greedy: Greedy) -> None:
    prompt = smollm2.tokenizer.encode(_TURN, True)
    (answer,) = greedy(smollm2, [prompt], 8, chunk_tokens=128)

    assert b"Paris" in b"".join(smollm2.tokenizer.token_bytes[token_id] for token_id in answer)
    assert answer[-1] in smollm2.tokenizer.end_token_ids


def test_smollm2_text_side_comes_from_the_gguf(smollm2: Runner) -> None:
    tokenizer, info = smollm2.tokenizer, smollm2.info

    assert "<|im_start|>" in info.chat_templates["default"]
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.prefix_token_ids == ()
    assert tokenizer.special_tokens["<|im_end|>"] in tokenizer.end_token_ids
    assert tokenizer.encode("in 2024", False) == tokenizer.encode("in 2024", True)
    assert tokenizer.token_bytes[tokenizer.encode(" Paris", False)[0]] == b" Paris"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_text_is_the_same_alone_batched_and_chunked(smollm2: Runner, greedy: Greedy) -> None:
    """Longer answers; float32 rounding differs between batches, but not enough to change a token here."""
    prompts = [smollm2.tokenizer.encode(text, True) for text in (_TURN, *_TEXTS[:3])]
    alone = [greedy(smollm2, [prompt], 40, chunk_tokens=128)[0] for prompt in prompts]

    assert greedy(smollm2, prompts, 40, chunk_tokens=128) == alone
    assert greedy(smollm2, prompts, 40, chunk_tokens=3) == alone
