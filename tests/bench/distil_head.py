"""An EAGLE-3 head for SmolLM2-135M-Instruct, trained on the model's own answers, and how many of its drafts are right:
``python -m bench.distil_head MODEL HEAD`` from ``tests``.

MODEL is a folder with safetensors, HEAD one that is written. The answers for training are those to short prompts about
words and functions of Python's standard library; those for measuring are to the forty prompts of the behaviour tests,
all greedy. Training follows EAGLE-3: the head reads its own states for the second token of a draft. Not a recipe for a
good head: a good one sees some thousand times as many tokens.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

from core.behaviours.workloads import PROMPTS
from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.drafter import DraftTask
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.heads.eagle3 import Eagle3Layer

__all__ = ["accepted", "answers_of", "train"]

_NUM_PROMPTS, _NUM_ANSWER, _BATCH = 256, 160, 32
_NUM_EPOCHS, _RATE, _DRAFT_VOCAB = 8, 1e-3, 4096
_MODULES = (
    "argparse", "ast", "asyncio", "calendar", "csv", "datetime", "email", "heapq", "json", "logging", "pathlib",
    "random", "shutil", "socket", "statistics", "string", "subprocess", "textwrap", "threading", "zipfile",
)  # fmt: skip
_FORMS = (
    "What is {word}?",
    "Write a short story about {word}.",
    "Explain {word} to a child.",
    "Give five tips about {word}.",
    "Write a Python function for {word}.",
    "Summarise this text:\n{text}",
    "Rewrite this text in simple words:\n{text}",
    "Make a JSON object with the facts of this text:\n{text}",
)


def _say(*parts: object) -> None:
    print(*parts, flush=True)


def _training_prompts() -> list[str]:
    """Prompts from the documentation of the standard library, in a fixed order."""
    rng, found = random.Random(0), []
    for name in _MODULES:
        for word, item in sorted(vars(importlib.import_module(name)).items()):
            text = inspect.getdoc(item) if not word.startswith("_") and callable(item) else None
            if text and len(text) > 80:
                found.append((word, text[:400]))
    rng.shuffle(found)
    return [rng.choice(_FORMS).format(word=word, text=text) for word, text in found[:_NUM_PROMPTS]]


def answers_of(model: Any, tokenizer: Any, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yield prompt and greedy answer of each text as token ids; prompts of similar length are computed together."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    prompts.sort(key=len)
    for begin in range(0, len(prompts), _BATCH):
        batch = prompts[begin : begin + _BATCH]
        width = max(len(prompt) for prompt in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        whole = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=_NUM_ANSWER, pad_token_id=0, eos_token_id=2
        )
        for prompt, row in zip(batch, whole[:, width:].tolist(), strict=True):
            end = row.index(2) + 1 if 2 in row else len(row)
            yield prompt + row[:end]


class _Student:
    """The head while it is trained, over one whole text at a time."""

    def __init__(self, model: Any, token_ids: Tensor) -> None:
        config = model.config
        self.config = LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            num_hidden_layers=1,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(token_ids),
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
        )
        self.layer = Eagle3Layer(self.config, 3 * config.hidden_size, 0, has_embedding=False)
        for parameter in self.layer.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.02)
        self.layer.lm_head.weight.data.copy_(model.get_output_embeddings().weight[token_ids])
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.embedding = model.get_input_embeddings()

    def step(self, token_ids: Tensor, features: Tensor, before: tuple[Tensor, Tensor] | None) -> Any:
        """Return states (T, size), and keys and values (heads, T, dim).

        Args:
            before: those of the first step: a pair of the second one reads them up to the one before it, then itself.
        """
        layer, attention, size = self.layer, self.layer.self_attn, len(token_ids)
        joined = torch.cat([layer.input_layernorm(self.embedding(token_ids)), layer.hidden_norm(features)], -1)[None]
        shape = (1, size, -1, attention.head_dim)
        query, key, value = (
            part(joined).view(shape).transpose(1, 2) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        positions = torch.arange(size)[None] + (before is not None)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(joined, positions))
        own = key, value = (
            repeat_kv(key, attention.num_key_value_groups),
            repeat_kv(value, attention.num_key_value_groups),
        )
        keys, values = own if before is None else before
        scores = query @ keys.transpose(2, 3) * attention.scaling
        scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
        if before is None:
            attended = scores.softmax(-1) @ values
        else:
            itself = (query * key).sum(-1, keepdim=True) * attention.scaling
            shares = torch.cat([scores, itself], -1).softmax(-1)
            attended = shares[..., :-1] @ values + shares[..., -1:] * value
        states = features + attention.o_proj(attended.transpose(1, 2).reshape(1, size, -1))[0]
        return states + layer.mlp(layer.post_attention_layernorm(states)), own

    def loss(self, token_ids: Tensor, features: Tensor, columns: Tensor) -> Tensor:
        """Mean loss of the first two tokens of drafts at every position of a text; ``columns`` are -1 for others."""
        total, states, before = torch.zeros(()), self.layer.fc(features[:-2]), None
        for number in range(2):
            inputs, targets = token_ids[1 + number : len(token_ids) - 1], columns[2 + number :]
            states = states[: len(inputs)]
            kept = None if before is None else tuple(part[:, :, : len(inputs)] for part in before)
            states, own = self.step(inputs, states, kept)
            before = before or own
            logits = self.layer.lm_head(self.layer.norm(states))
            total = total + cross_entropy(logits, targets, ignore_index=-1) / 2
        return total


def train(model: Any, texts: Sequence[list[int]], folder: Path) -> None:
    """Train a head on texts, and write it."""
    counts = np.bincount(np.concatenate(texts), minlength=model.config.vocab_size)
    token_ids = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:_DRAFT_VOCAB]))
    column = torch.full((model.config.vocab_size,), -1)
    column[token_ids] = torch.arange(len(token_ids))
    num_layers = model.config.num_hidden_layers
    reads = [1, num_layers // 2 - 1, num_layers - 4]
    student = _Student(model, token_ids)
    student.layer.train()
    optimizer = torch.optim.AdamW(student.layer.parameters(), _RATE, weight_decay=0.01)
    num_steps = _NUM_EPOCHS * (len(texts) // 4 + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, num_steps, pct_start=0.1)
    lessons = []
    for text in texts:
        ids = torch.tensor(text)
        with torch.no_grad():
            states = model.model(ids[None], output_hidden_states=True).hidden_states
        lessons.append((ids, torch.cat([states[layer + 1][0] for layer in reads], -1).half()))
    _say(f"{sum(map(len, texts))} tokens of {len(texts)} texts")
    rng = random.Random(1)
    for epoch in range(_NUM_EPOCHS):
        rng.shuffle(lessons)
        losses, started = [], time.perf_counter()
        for begin in range(0, len(lessons), 4):
            batch = lessons[begin : begin + 4]
            optimizer.zero_grad()
            loss = torch.stack([student.loss(ids, kept.float(), column[ids]) for ids, kept in batch]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(student.layer.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        _say(f"epoch {epoch}: loss {np.mean(losses):.3f}, {time.perf_counter() - started:.0f} s")
        _write(student, token_ids, reads, folder)


def _write(student: _Student, token_ids: Tensor, reads: list[int], folder: Path) -> None:
    """Write the head as SpecForge does."""
    folder.mkdir(parents=True, exist_ok=True)
    outer = ("fc.", "norm.", "lm_head.")
    tensors = {
        (name if name.startswith(outer) else f"midlayer.{name}"): tensor.detach().contiguous()
        for name, tensor in student.layer.state_dict().items()
    }
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = student.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": reads, "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(settings))


def accepted(folder: Path, head: Path, texts: Sequence[tuple[int, list[int]]], num_tokens: int = 4) -> list[int]:
    """Return how many drafts have 0, 1, ... right tokens, at every position of the answers.

    Args:
        texts: lengths of prompts, and token ids of prompts and answers.
    """
    options = HfOptions(dtype="float32", device="cpu", context=2048, slots=1)
    runner: Any = HfBackend().open(ModelSource(str(folder), folder), options, lambda _share, _what: None)
    drafts = runner.open_head(ModelSource(str(head), head), max_tokens=num_tokens, min_probability=0.0)
    counts = [0] * (num_tokens + 1)
    for num_prompt, text in texts:
        ids, sequence = np.array(text, np.int32), runner.open_sequence()
        runner.forward([Span(sequence, 0, ids[:num_prompt], "none")])
        for length in range(num_prompt + 1, len(ids) - num_tokens):
            task = DraftTask(drafts, ids[:length], sequence, num_tokens)
            while (draft := drafts.propose([task])[0]) is None:
                pass
            right = np.cumprod(np.array(draft.token_ids) == ids[length : length + num_tokens]).sum()
            counts[int(right)] += 1
            runner.forward([Span(sequence, length - 1, ids[length - 1 : length], "none")])
        runner.free_sequence(sequence)
    return counts


def main() -> None:
    """Train, then measure."""
    folder, head = Path(sys.argv[1]), Path(sys.argv[2])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not head.exists():
        train(model, list(answers_of(model, tokenizer, _training_prompts())), head)
    tests = [prompt.messages[-1]["content"] if prompt.messages else "" for prompt in PROMPTS]
    texts = list(answers_of(model, tokenizer, [text[:600] for text in tests if text]))
    lengths = [_prompt_length(tokenizer, text) for text in texts]
    counts = np.array(accepted(folder, head, list(zip(lengths, texts, strict=True))))
    shares = [float(counts[number:].sum() / counts.sum()) for number in range(1, len(counts))]
    _say(f"{counts.sum()} drafts; at least 1, 2, ... right: " + ", ".join(f"{share:.2f}" for share in shares))
    _say("tokens per step with drafts of 1, 2, ...: " + ", ".join(f"{1 + total:.2f}" for total in np.cumsum(shares)))


def _prompt_length(tokenizer: Any, text: list[int]) -> int:
    """Length up to the beginning of the answer."""
    mark = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    return next(end for end in range(len(text), 0, -1) if text[end - len(mark) : end] == mark)


if __name__ == "__main__":
    main()
