"""Tests by experiment if a model's logits depend on how its tokens are batched.

On CPUs llama.cpp uses different kernels for one row than for several if a quantisation provides them (Q8_0, Q5_0 and
Q4_0 do, Q4_1 and the K types do not), and other attention kernels for long chunks, unless K and V differ in type.
"""

from __future__ import annotations

import numpy as np

from enginehouse.contract.backend import Runner, Span
from enginehouse_llamacpp.library import Library
from enginehouse_llamacpp.options import LlamaCppOptions

__all__ = ["is_batch_invariant", "may_be_batch_invariant"]

_HALF = ("f16", "f32")
"""If K and V both have one of these types, llama.cpp uses another attention kernel for long chunks."""

_CHUNKS = (1, 2, 7)
"""One row, and two or more rows, use different kernels."""


def may_be_batch_invariant(library: Library, options: LlamaCppOptions, has_positions_only: bool) -> bool:
    """True if a test is worthwhile: on the CPU, with attention kernels that accumulate position by position.

    Args:
        has_positions_only: all layers keep every position; no sliding window, no recurrent state.
    """
    uses_gpu = library.has_gpu and options.n_gpu_layers != 0
    # f32 is converted to f16 before each pass; an unset V type becomes bf16.
    has_own_kernels = options.type_k in _HALF and options.type_v in _HALF
    return options.batch_invariant and has_positions_only and not uses_gpu and not has_own_kernels


def is_batch_invariant(runner: Runner) -> bool:
    """True if rows computed at once and in chunks beside another sequence are bitwise equal."""
    num_tokens = sum(_CHUNKS)
    token_ids = (np.arange(2, num_tokens + 2, dtype=np.int64) * 7919 % runner.info.vocab_size).astype(np.int32)
    sequence = runner.open_sequence()
    expected = runner.forward([Span(sequence, 0, token_ids, "all")]).host().copy()
    runner.truncate(sequence, 0)
    others = [runner.open_sequence()] if runner.capabilities.max_sequences > 1 else []
    is_equal = True
    for size in _CHUNKS:
        start = runner.length(sequence)
        spans = [Span(other, runner.length(other), token_ids[:1], "none") for other in others if size > 1]
        rows = runner.forward([*spans, Span(sequence, start, token_ids[start : start + size], "all")]).host()
        is_equal = is_equal and np.array_equal(rows, expected[start : start + size])
    for opened in (sequence, *others):
        runner.free_sequence(opened)
    return is_equal
