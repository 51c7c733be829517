"""A model with recurrent layers on one GPU, beside transformers: ``python -m bench.cuda_hybrids`` from ``tests``.

Decode steps of 1, 8 and 32 sequences, a prompt of 2,048 tokens, and the first token of a second turn with and without a
checkpoint, of the shape ``hybrid-2b`` with random weights. transformers' ``generate`` runs without
flash-linear-attention and causal-conv1d where these are not installed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import Draw, LastSampled, Span
from enginehouse.contract.types import SamplingParams

from .cuda import measure_card, open_shape
from .cuda_models import SHAPES, write_shape

__all__ = ["measure_ours", "measure_theirs"]

_NAME = "hybrid-2b"
_GREEDY = SamplingParams(temperature=0.0)
_CONTEXT, _PROMPT = 600, 2048


def _say(*parts: object) -> None:
    print(*parts, flush=True)


def _ids(num_tokens: int) -> NDArray[np.int32]:
    return np.random.default_rng(num_tokens).integers(300, SHAPES[_NAME]["vocab_size"] - 1, num_tokens).astype(np.int32)


def step_bytes(num_sequences: int, context: int) -> float:
    """Bytes that a decode step must move: weights, keys and values once, states read and written."""
    c = SHAPES[_NAME]
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    num_attention = c["num_hidden_layers"] // c["full_attention_interval"]
    num_recurrent = c["num_hidden_layers"] - num_attention
    attention = hidden * (3 * heads + 2 * kv) * dim  # with the gates
    recurrent = hidden * (2 * keys + 3 * values)
    weights = num_attention * attention + num_recurrent * recurrent + hidden * c["vocab_size"]
    weights += 3 * c["num_hidden_layers"] * hidden * inner
    states = num_recurrent * values * c["linear_key_head_dim"]
    return 2.0 * weights + num_sequences * (2 * 4.0 * states + 2.0 * context * num_attention * 2 * kv * dim)


def _median_of(work: Callable[[], None], num_runs: int = 5) -> float:
    """Seconds, the device included."""
    times = []
    for _ in range(num_runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure_steps(runner: Any, num_sequences: int, bandwidth: float) -> None:
    """Decode steps, launched one ahead, tokens read one step late."""
    sequences = [runner.open_sequence() for _ in range(num_sequences)]
    for sequence in sequences:
        runner.forward([Span(sequence, 0, _ids(_CONTEXT), "none")])
    spans = [Span(sequence, _CONTEXT, np.array([300], np.int32)) for sequence in sequences]
    pending, times = None, []
    for step in range(30):
        started = time.perf_counter()
        output = runner.forward(spans)
        draws = [Draw(row=row, sequence=one, sampling=_GREEDY, number=0.5) for row, one in enumerate(sequences)]
        drawn = runner.sample(output, draws)
        if pending is not None:
            pending.host()
        pending = drawn
        spans = [Span(sequence, _CONTEXT + 1 + step, LastSampled()) for sequence in sequences]
        times.append(time.perf_counter() - started)
    pending.host()
    for sequence in sequences:
        runner.free_sequence(sequence)
    median, floor = statistics.median(times[5:]), step_bytes(num_sequences, _CONTEXT) / bandwidth
    _say(f"decode step, {num_sequences} sequences of {_CONTEXT}: {median * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms")


def _measure_turns(runner: Any) -> None:
    """The first token of a prompt, and of the same prompt with other 64 tokens at the end."""
    prompt = _ids(_PROMPT + 64)

    def first() -> None:
        sequence = runner.open_sequence()
        runner.forward([Span(sequence, 0, prompt[:_PROMPT])]).host()
        runner.free_sequence(sequence)

    _say(f"prompt of {_PROMPT}: {_median_of(first) * 1e3:.1f} ms; chunks of {runner.capabilities.prefill_chunk_tokens}")
    for keeps in (True, False):
        times = []
        for _ in range(5):
            sequence = runner.open_sequence()
            runner.forward([Span(sequence, 0, prompt[:_PROMPT], "none")])
            if keeps:
                runner.keep_checkpoint(sequence)
            for begin, end in ((0, 40), (40, 41)):
                runner.forward([Span(sequence, _PROMPT + begin, _ids(64)[begin:end], "none")])
            torch.cuda.synchronize()
            started = time.perf_counter()
            kept = runner.truncate(sequence, _PROMPT)
            runner.forward([Span(sequence, kept, prompt[kept:])]).host()
            times.append(time.perf_counter() - started)
            runner.free_sequence(sequence)
        what = "with a checkpoint" if keeps else "without checkpoints"
        _say(f"second turn of {_PROMPT} + 64 tokens, {what}: first token after {statistics.median(times) * 1e3:.1f} ms")


def measure_ours(bandwidth: float, **options: Any) -> Any:
    """Measure the hf backend; returns the open runner."""
    runner = open_shape(_NAME, **{"slots": 32, "context": 4096, "cache_tokens": 65_536, **options})
    for num_sequences in (1, 8, 32):
        _measure_steps(runner, num_sequences, bandwidth)
    _measure_turns(runner)
    return runner


def measure_theirs() -> None:
    """Measure ``generate``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_shape(_NAME, Path(tempfile.gettempdir()) / _NAME)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    def seconds(ids: torch.Tensor, num_tokens: int) -> float:
        lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        return _median_of(lambda: model.generate(ids, do_sample=False, **lengths), 3)

    for num_sequences in (1, 8, 32):
        ids = torch.from_numpy(_ids(_CONTEXT).astype(np.int64)).cuda().expand(num_sequences, -1)
        seconds(ids, 2)
        step_s = (seconds(ids, 10) - seconds(ids, 2)) / 8
        _say(f"transformers, step of generate, {num_sequences} sequences of {_CONTEXT}: {step_s * 1e3:.1f} ms")
    ids = torch.from_numpy(_ids(_PROMPT).astype(np.int64)).cuda()[None]
    _say(f"transformers, prompt of {_PROMPT}: {seconds(ids, 1) * 1e3:.1f} ms")


def main() -> None:
    """Run both, or the one that the command line names: ``ours``, ``unfused`` or ``transformers``."""
    bandwidth = measure_card()
    parts: dict[str, Callable[[], None]] = {
        "ours": lambda: measure_ours(bandwidth).close(),
        "unfused": lambda: measure_ours(bandwidth, fused=False).close(),
        "transformers": measure_theirs,
    }
    for name in sys.argv[1:] or ("ours", "transformers"):
        parts[name]()


if __name__ == "__main__":
    main()
