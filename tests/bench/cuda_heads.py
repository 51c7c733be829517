"""Drafts of an EAGLE-3 head, and of the MTP layer of a hybrid, on one GPU: parts of ``bench.cuda``.

The weights of the model are changed so that each token is followed by the next id (see ``cuda_speculation``), and those
of the head so that it knows this of a given share of the tokens: its layer attends from each pair to itself, passes on
the embedding, and the row of its output layer that belongs to the following token points along it. Everything is
computed as with trained weights, and the sizes are those of published heads of Llama 3.1 8B. An MTP layer adds nothing
to the embedding that it passes on, and gets an output layer of its own.

One engine drafts, the other does not. For one client the latter runs before the head is opened, as the model's own
passes record features afterwards.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers.models.llama import LlamaConfig

from enginehouse.contract.backend import Span
from enginehouse.contract.drafter import BoundDrafter, DraftTask
from enginehouse.contract.types import SamplingParams
from enginehouse_hf.attention import ATTENTION_NAME
from enginehouse_hf.heads.eagle3 import Eagle3Head, Eagle3Layer
from enginehouse_hf.heads.reading import without_weights

from .cuda_models import SHAPES
from .cuda_speculation import (
    FIRST_WORD,
    NUM_ANSWER,
    NUM_PROMPT,
    TOP_LOGIT,
    Subject,
    chain_tokens,
    speeds_of,
    step_lines,
)

__all__ = ["measure_heads", "measure_mtp", "write_mtp"]

_DRAFT_VOCAB = 32_000
_SHARES = (0.8, 1.0, 0.6, 0.0)
_MAX_TOKENS = 6
_NUM_ROUNDS = 2


def measure_heads(runner: Any, embeddings: Tensor, output: Tensor) -> Iterator[str]:
    """Lines about every share of tokens that an EAGLE-3 head knows.

    Args:
        runner: of a model of Llama 3.1 8B's shape with random weights, with four slots or more.
        embeddings: its weights, (vocab_size, hidden_size); changed.
        output: of its output projection; changed.
    """
    yield from _measure(runner, embeddings, output, lambda: _make_eagle3(runner, embeddings))


def measure_mtp(runner: Any, embeddings: Tensor, output: Tensor) -> Iterator[str]:
    """The same about the MTP layer of a model in a folder of :func:`write_mtp`."""
    yield from _measure(runner, embeddings, output, lambda: _make_mtp(runner, embeddings))


def _measure(
    runner: Any, embeddings: Tensor, output: Tensor, make: Callable[[], tuple[Any, Callable[[float], None]]]
) -> Iterator[str]:
    """Lines about a head; ``make`` returns it, and a function that teaches it a share of the tokens."""
    chain_tokens(embeddings, output, embeddings.shape[0])
    alone = _run(runner, {}, 1)
    head, teach = make()
    runner._load_head = lambda _source: head
    started = time.perf_counter()
    drafts = runner.open_head(None, max_tokens=_MAX_TOKENS, min_probability=0.4)
    yield f"head: open after {time.perf_counter() - started:.1f} s, graphs recorded again"
    yield from _draft_lines(runner, drafts)
    for share in _SHARES:
        teach(share)
        yield from _compare(runner, alone, drafts, share, 1)
    yield from step_lines("before the head was opened", alone.steps)
    several = _run(runner, {}, 4)
    for share in _SHARES:
        teach(share)
        yield from _compare(runner, several, drafts, share, 4)


def _compare(runner: Any, plain: Subject, drafts: BoundDrafter, share: float, num_clients: int) -> Iterator[str]:
    """Lines about an engine with drafts beside one without."""
    drafted = _run(runner, {"head": drafts}, num_clients)
    yield f"head that knows {share:.0%} of the tokens, {num_clients} at once: {speeds_of(plain, drafted)}"
    yield f"  drafted {drafted.num_drafted}, accepted {drafted.num_accepted}, of {drafted.num_tokens} tokens"
    yield from step_lines("with a head", drafted.steps)


def _run(runner: Any, drafters: Mapping[str, BoundDrafter], num_clients: int) -> Subject:
    """An engine after some rounds; the first is not counted."""
    subject, rng = Subject.over(runner, drafters), np.random.default_rng(0)
    for round_number in range(_NUM_ROUNDS + 1):
        prompts = rng.integers(FIRST_WORD, _DRAFT_VOCAB - 2 * NUM_ANSWER, (num_clients, NUM_PROMPT)).tolist()
        subject.run(prompts, SamplingParams(temperature=0.0))
        if not round_number:
            subject.forget()
    return subject


def _draft_lines(runner: Any, drafts: BoundDrafter) -> Iterator[str]:
    """Milliseconds of drafts of some lengths, and of reading a prompt."""
    rng, sequences, tasks = np.random.default_rng(0), [], []
    for _ in range(4):
        token_ids = rng.integers(FIRST_WORD, _DRAFT_VOCAB, NUM_PROMPT).astype(np.int32)
        sequences.append(runner.open_sequence())
        runner.forward([Span(sequences[-1], 0, token_ids[:-1])])
        tasks.append((token_ids, sequences[-1]))
    for clients in (1, 4):
        for size in (1, 2, 4, 6):
            asked = [DraftTask(None, token_ids, sequence, size) for token_ids, sequence in tasks[:clients]]
            times = []
            for _ in range(12):
                torch.cuda.synchronize()
                started = time.perf_counter()
                drafts.propose(asked)
                times.append((time.perf_counter() - started) * 1e3)
            later = statistics.median(times[2:])
            yield f"  propose {size} tokens for {clients}: first {times[0]:.2f} ms, then {later:.2f} ms"
    for sequence in sequences:
        runner.free_sequence(sequence)


def _make_eagle3(runner: Any, embeddings: Tensor) -> tuple[Any, Callable[[float], None]]:
    """A head with random weights where they do not matter."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=embeddings.shape[0],
        attention_bias=True,
        max_position_embeddings=2048,
        draft_vocab_size=_DRAFT_VOCAB,
        norm_before_residual=True,
        attn_implementation=ATTENTION_NAME,
    )
    with without_weights(embeddings.dtype):
        layer = Eagle3Layer(config, 3 * 4096, runner.num_layers, has_embedding=False)
    layer = layer.to_empty(device=embeddings.device).requires_grad_(False).eval()
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.01)
    attention = layer.self_attn
    layer.hidden_norm.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    for part in (attention.q_proj, attention.k_proj):
        part.weight.zero_()
        part.bias.fill_(30.0)
    width = attention.v_proj.out_features
    attention.v_proj.weight.copy_(torch.eye(width, 2 * 4096))
    attention.o_proj.weight.zero_()
    places = torch.arange(width, device=embeddings.device)
    attention.o_proj.weight[places, places // 128 * 4 * 128 + places % 128] = 1.0  # four query heads share a key head
    ids = torch.arange(_DRAFT_VOCAB, device=embeddings.device)
    embedding = nn.Embedding.from_pretrained(embeddings)
    head = Eagle3Head(layer, config, reads=[1, 15, 28], embedding=embedding, token_ids=ids, identity="bench")
    directions = normalize(embeddings[:_DRAFT_VOCAB].float(), dim=1)[:, :width]

    def teach(share: float) -> None:
        following = _following(_DRAFT_VOCAB, share).to(embeddings.device)
        with torch.inference_mode():
            layer.lm_head.weight.zero_()
            layer.lm_head.weight[:, :width].index_copy_(0, following, directions[:-1].to(embeddings.dtype))

    return head, teach


def _make_mtp(runner: Any, embeddings: Tensor) -> tuple[Any, Callable[[float], None]]:
    """The layer of the files with an output layer of its own."""
    vocab_size, size = embeddings.shape
    head = runner._load_head(None)
    head._output = output = nn.Linear(size, vocab_size, bias=False, device=embeddings.device, dtype=embeddings.dtype)
    output.requires_grad_(False)
    rows = normalize(embeddings.float(), dim=1).mul_(TOP_LOGIT / math.sqrt(size)).to(embeddings.dtype)

    def teach(share: float) -> None:
        with torch.inference_mode():
            output.weight.index_copy_(0, _following(vocab_size, share).to(rows.device), rows[:-1])

    return head, teach


def write_mtp(name: str, folder: Path) -> None:
    """Write the MTP layer of Qwen 3.5's form that :func:`_make_mtp` needs to the folder of a shape."""
    c = SHAPES[name]
    size, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    num_query, num_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (2 * num_query, size),
        "self_attn.k_proj": (num_kv, size),
        "self_attn.v_proj": (num_kv, size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
    }
    zeros = {"self_attn.o_proj": (size, num_query), "mlp.down_proj": (size, inner), "input_layernorm": (size,),
             "post_attention_layernorm": (size,), "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}  # fmt: skip
    tensors = {
        f"mtp.layers.0.{part}.weight": torch.randn(shape).mul_(0.01).bfloat16() for part, shape in shapes.items()
    }
    tensors |= {f"mtp.layers.0.{part}.weight": torch.zeros(shape).bfloat16() for part, shape in zeros.items()}
    tensors |= {f"mtp.{part}.weight": torch.zeros(size).bfloat16()
                for part in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}  # fmt: skip
    tensors["mtp.fc.weight"] = torch.eye(size, 2 * size).bfloat16()
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})


def _following(num_tokens: int, share: float) -> Tensor:
    """The token that a head takes to follow each but the last: the next one for a share, for others a wrong one."""
    following = torch.arange(1, num_tokens)
    wrong = (torch.rand(len(following), generator=torch.Generator().manual_seed(0)) >= share).nonzero()[:, 0]
    following[wrong] = following[wrong.roll(1)]
    return following
