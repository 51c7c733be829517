"""Chooses the sizes of the cache and the batches from the options and the model."""

from __future__ import annotations

from attrs import evolve, frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.sequences import NUM_OWN_SEQUENCES

__all__ = [
    "GGML_TYPES",
    "SHORT_TEXT_TOKENS",
    "CacheSizes",
    "choose_pooling_sizes",
    "choose_sizes",
    "short_pooling_sizes",
    "type_bytes",
]

_DEFAULT_CONTEXT = 4096
_KEPT_SEQUENCES = 56
_LOGITS_BYTES = 64 * 2**20
"""llama.cpp allocates one row of logits per sequence, used or not."""

_MAX_SEQUENCES = 256 - NUM_OWN_SEQUENCES
"""llama.cpp has 256 sequence ids."""

_POOLED_TEXTS = 128
_OUTPUT_BYTES = 2**30
"""llama.cpp's buffer holds a row of logits for each token of a pass, also if the model has none."""

SHORT_TEXT_TOKENS = 63
"""Longest text for which llama.cpp is faster without ``flash_attn``, which computes in tiles from 64 tokens on."""

_BATCH_STEP = 64
"""A context's size fixes where its tensors are. In one for a multiple of this many tokens, all of them begin at a
multiple of 64 bytes: AVX-512 then computes a text of 24 tokens in a fifth less time than in a context for 63."""

_CELL_STEP = 256
"""llama.cpp rounds the number of cells up to a multiple of this."""

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""Numbers of ggml's tensor types (``enum ggml_type``)."""

_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}


@frozen(kw_only=True)
class CacheSizes:
    """Sizes that llama.cpp fixes when a context is created.

    Attributes:
        max_context: longest sequence in tokens.
        cache_tokens: KV positions that all sequences may hold together.
        num_cells: KV positions in llama.cpp; more with ``keeps_order``, so that compaction is rare.
        max_sequences: maximum number of sequences that hold positions.
        num_sequence_ids: number of llama.cpp ids; more with ``keeps_order``.
        batch_tokens: maximum tokens per forward pass.
        chunk_tokens: tokens that llama.cpp computes at once.
        keeps_order: see :class:`enginehouse_llamacpp.sequences.SequenceTable`.
        type_k, type_v: ggml's numbers for the types of the KV cache.
    """

    max_context: int
    cache_tokens: int
    num_cells: int
    max_sequences: int
    num_sequence_ids: int
    batch_tokens: int
    chunk_tokens: int
    keeps_order: bool
    type_k: int
    type_v: int


def choose_sizes(
    options: LlamaCppOptions, trained_context: int, vocab_size: int, keeps_order: bool, *, has_state: bool = False
) -> CacheSizes:
    """Choose the sizes for a model.

    Args:
        trained_context: 0 if unknown.
        has_state: llama.cpp allocates a recurrent state for each sequence, used or not, so fewer are kept.
    """
    context = options.context or min(trained_context or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    cache_tokens = options.cache_tokens or max(context, _DEFAULT_CONTEXT)
    rows = max(_LOGITS_BYTES // (4 * max(vocab_size, 1)), 1)
    kept = min(_KEPT_SEQUENCES, options.slots if has_state else max(rows - options.slots, options.slots))
    max_sequences = options.max_sequences or min(options.slots + kept, _MAX_SEQUENCES)
    num_sequence_ids = max_sequences + (NUM_OWN_SEQUENCES if keeps_order else 0)
    batch_tokens = max(min(options.n_batch, cache_tokens), num_sequence_ids)
    slack = max(cache_tokens // 4, batch_tokens) if keeps_order else 0
    return CacheSizes(
        max_context=min(context, cache_tokens),
        cache_tokens=cache_tokens,
        num_cells=-(-(cache_tokens + slack) // _CELL_STEP) * _CELL_STEP,
        max_sequences=max_sequences,
        num_sequence_ids=num_sequence_ids,
        batch_tokens=batch_tokens,
        chunk_tokens=min(options.n_ubatch or batch_tokens, batch_tokens),
        keeps_order=keeps_order,
        type_k=GGML_TYPES[options.type_k],
        type_v=GGML_TYPES[options.type_v or ("bf16" if keeps_order else "f16")],
    )


def choose_pooling_sizes(options: LlamaCppOptions, trained_context: int, vocab_size: int) -> CacheSizes:
    """Choose the sizes for a pooling model: a pass is computed at once, and nothing is kept after it.

    Raises:
        ModelLoadError: ``context`` is longer than the model was trained for; beyond that, llama.cpp ends the process.
    """
    limit = trained_context or _DEFAULT_CONTEXT
    fitting = max(_OUTPUT_BYTES // (4 * max(vocab_size, 1)), options.n_batch)
    context = options.context or min(limit, _DEFAULT_CONTEXT, fitting)
    if context > limit:
        raise ModelLoadError(f"context is {context}, but this model has {limit} positions; set context to at most that")
    longest = max(context, options.n_batch)
    num_texts = min(options.max_sequences or _POOLED_TEXTS, longest)
    num_sequence_ids = 1 << (num_texts - 1).bit_length()  # must divide the batch: llama.cpp ends the process otherwise
    step = max(_BATCH_STEP, num_sequence_ids)
    batch_tokens = -(-longest // step) * step
    return CacheSizes(
        max_context=context,
        cache_tokens=batch_tokens,
        num_cells=-(-batch_tokens // _CELL_STEP) * _CELL_STEP,
        max_sequences=num_texts,
        num_sequence_ids=num_sequence_ids,
        batch_tokens=batch_tokens,
        chunk_tokens=batch_tokens,
        keeps_order=False,
        type_k=GGML_TYPES[options.type_k],
        type_v=GGML_TYPES[options.type_v or "f16"],
    )


def short_pooling_sizes(sizes: CacheSizes) -> CacheSizes:
    """Return the sizes of the context that computes single short texts of a pooling model."""
    return evolve(
        sizes,
        max_context=SHORT_TEXT_TOKENS,
        cache_tokens=SHORT_TEXT_TOKENS,
        num_cells=_CELL_STEP,
        max_sequences=1,
        num_sequence_ids=1,
        batch_tokens=_BATCH_STEP,
        chunk_tokens=_BATCH_STEP,
    )


def type_bytes(name: str, count: int) -> int:
    """Bytes of ``count`` numbers of a KV type; quantised types come in blocks of 32."""
    if name in _BLOCK_BYTES:
        return -(-count // 32) * _BLOCK_BYTES[name]
    return count * (4 if name == "f32" else 2)
