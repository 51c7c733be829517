"""Builds a runner from a file: model, context, tokenizer, warm-up, in the order of their cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from enginehouse.backend import Progress, RunnerCapabilities, Span
from enginehouse_llamacpp.batch import Batch
from enginehouse_llamacpp.cells import CellMap
from enginehouse_llamacpp.context import Context
from enginehouse_llamacpp.cores import usable_cores
from enginehouse_llamacpp.library import Library
from enginehouse_llamacpp.memory import SequenceMemory
from enginehouse_llamacpp.metadata import describe_model
from enginehouse_llamacpp.model import load_model
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.sequences import SequenceTable
from enginehouse_llamacpp.sizes import CacheSizes, choose_sizes
from enginehouse_llamacpp.threads import ThreadChooser
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer

__all__ = ["open_runner"]

_WEIGHTS_SHARE = 0.8
"""Share of the loading time, roughly; the rest is tables, cache and warm-up."""


def open_runner(library: Library, path: Path, options: LlamaCppOptions, progress: Progress) -> LlamaCppRunner:
    """Load ``path`` and warm it up.

    Raises:
        ModelLoadError: the file is missing, damaged or not supported, or memory is short.
    """
    model = load_model(library, path, options, lambda share: progress(_WEIGHTS_SHARE * share, "loading weights"))
    try:
        runner = _build(library, model, options, progress)
    except BaseException:
        library.bindings.llama_model_free(model)
        raise
    try:
        progress(0.95, "warming up")
        _warm_up(runner)
    except BaseException:
        runner.close()
        raise
    progress(1.0, "ready")
    return runner


def _build(library: Library, model: int, options: LlamaCppOptions, progress: Progress) -> LlamaCppRunner:
    bindings = library.bindings
    progress(_WEIGHTS_SHARE, "reading the vocabulary")
    tokenizer = LlamaCppTokenizer(bindings, bindings.llama_model_get_vocab(model))
    sizes = choose_sizes(options, bindings.llama_model_n_ctx_train(model), tokenizer.vocab_size)
    progress(0.9, "making the KV cache")
    threads = ThreadChooser.fixed(options.threads) if options.threads else ThreadChooser.adaptive(usable_cores())
    context = Context(library, model, options, sizes, threads.max_threads)
    window_tokens = bindings.llama_model_n_swa(model)
    is_recurrent = bindings.llama_model_is_recurrent(model) or bindings.llama_model_is_hybrid(model)
    memory = SequenceMemory(bindings, context.address, window_tokens, is_recurrent)
    cells = CellMap(context.cache_tokens, sizes.chunk_tokens)
    return LlamaCppRunner(
        capabilities=_capabilities(library, options, sizes, window_tokens, is_recurrent),
        tokenizer=tokenizer,
        info=describe_model(bindings, model, tokenizer, sizes.max_context),
        context=context,
        sequences=SequenceTable(memory, cells, sizes.max_sequences),
        cells=cells,
        batch=Batch(bindings, sizes.batch_tokens),
        threads=threads,
        log=library.log,
        release=_releaser(library, model),
    )


def _capabilities(
    library: Library, options: LlamaCppOptions, sizes: CacheSizes, window_tokens: int, is_recurrent: bool
) -> RunnerCapabilities:
    uses_gpu = library.has_gpu and options.n_gpu_layers != 0
    return RunnerCapabilities(
        max_sequences=sizes.max_sequences,
        max_batch_tokens=sizes.batch_tokens,
        max_context=sizes.max_context,
        cache_tokens=sizes.cache_tokens,
        truncate="none" if is_recurrent else "bounded" if window_tokens else "any",
        fork="share",
        batch_invariant=False,
        abort=not uses_gpu,
    )


def _releaser(library: Library, model: int) -> Callable[[], None]:
    return lambda: library.bindings.llama_model_free(model)


def _warm_up(runner: LlamaCppRunner) -> None:
    """Touch all weights and both kinds of kernels (one token, several), so that the first request is not slower."""
    sequence = runner.open_sequence()
    for num_tokens in (min(16, runner.capabilities.max_batch_tokens), 1):
        token_ids = np.arange(num_tokens, dtype=np.int32) % runner.info.vocab_size
        runner.forward([Span(sequence, runner.length(sequence), token_ids)])
    runner.free_sequence(sequence)
