"""Builds a runner or a pooler from a file: weights, vocabulary, context, warm-up, in order of cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import evolve, frozen

from enginehouse.contract.backend import Progress, RunnerCapabilities
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.pooler import PoolerCapabilities
from enginehouse_backendkit.threads import MAX_ADAPTED_TOKENS, ThreadChooser, thread_counts
from enginehouse_llamacpp.adapters import Adapters
from enginehouse_llamacpp.batch import Batch
from enginehouse_llamacpp.cells import CellMap
from enginehouse_llamacpp.context import Context
from enginehouse_llamacpp.cores import usable_cores
from enginehouse_llamacpp.invariance import is_batch_invariant, may_be_batch_invariant
from enginehouse_llamacpp.library import Bindings, Library
from enginehouse_llamacpp.memory import SequenceMemory
from enginehouse_llamacpp.metadata import describe_model, read_pre_tokenizer, read_word_rules
from enginehouse_llamacpp.model import load_model
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.pooler import LlamaCppPooler
from enginehouse_llamacpp.pooling import read_head, read_pair_layout, read_text_layout
from enginehouse_llamacpp.pooling_type import PoolingType
from enginehouse_llamacpp.projector import Projector
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.sequences import SequenceTable
from enginehouse_llamacpp.sizes import (
    SHORT_TEXT_TOKENS,
    CacheSizes,
    choose_pooling_sizes,
    choose_sizes,
    short_pooling_sizes,
)
from enginehouse_llamacpp.tokenizer import LlamaCppTokenizer
from enginehouse_llamacpp.wordpiece import WordPieceTokenizer

__all__ = ["open_pooler", "open_runner"]

_Opened = TypeVar("_Opened")

_WEIGHTS_SHARE = 0.8
"""Approximate share of the loading time; the rest is tables, cache and warm-up."""

_WARMING_UP = "making the context and warming up"


def open_runner(
    library: Library, path: Path, options: LlamaCppOptions, progress: Progress, projector: Path | None = None
) -> LlamaCppRunner:
    """Load ``path`` and warm it up, with the file of a projector for models that read images.

    Raises:
        ModelLoadError: a file is missing, damaged or not supported, or there is not enough memory.
    """

    def build(model: _Model) -> LlamaCppRunner:
        if projector is None:
            return _open_warm(library, model, options, None)
        images = _open_projector(library, model, projector, options, progress)
        progress(0.9, _WARMING_UP)
        try:
            return _open_warm(library, model, options, images)
        except BaseException:
            images.close()
            raise

    return _open(library, path, options, progress, build)


def _open_projector(
    library: Library, model: _Model, path: Path, options: LlamaCppOptions, progress: Progress
) -> Projector:
    sizes = model.choose_sizes(options, options.batch_invariant)
    progress(_WEIGHTS_SHARE, f"loading the projector {path.name}")  # if llama.cpp ends the process, this is known
    return Projector(
        library,
        model.address,
        path,
        options,
        threads=_thread_chooser(options).max_threads,
        batch_tokens=sizes.chunk_tokens,
        progress=lambda share: progress(_WEIGHTS_SHARE, f"loading the projector {path.name}, {share:.0%}"),
    )


def open_pooler(
    library: Library, path: Path, options: LlamaCppOptions, pooling: PoolingType, progress: Progress
) -> LlamaCppPooler:
    """Load a pooling model and warm it up.

    Raises:
        ModelLoadError: see :func:`open_runner`; or the file lacks what pooling needs.
    """
    return _open(library, path, options, progress, lambda model: _open_warm_pooler(library, model, options, pooling))


def _open(
    library: Library, path: Path, options: LlamaCppOptions, progress: Progress, build: Callable[[_Model], _Opened]
) -> _Opened:
    address = load_model(library, path, options, lambda share: progress(_WEIGHTS_SHARE * share, "loading weights"))
    try:
        progress(_WEIGHTS_SHARE, "reading the vocabulary")
        model = _Model.read(library, address)
        progress(0.9, _WARMING_UP)
        opened = build(model)
    except BaseException:
        library.bindings.llama_model_free(address)
        raise
    progress(1.0, "ready")
    return opened


@frozen
class _Model:
    """Loaded weights and the model properties that a context needs."""

    address: int
    tokenizer: LlamaCppTokenizer
    trained_context: int
    window_tokens: int
    is_recurrent: bool

    @classmethod
    def read(cls, library: Library, address: int) -> _Model:
        """Read the properties of a model from llama.cpp."""
        bindings = library.bindings
        return cls(
            address,
            _read_tokenizer(bindings, address),
            bindings.llama_model_n_ctx_train(address),
            bindings.llama_model_n_swa(address),
            bindings.llama_model_is_recurrent(address) or bindings.llama_model_is_hybrid(address),
        )

    def choose_sizes(self, options: LlamaCppOptions, keeps_order: bool) -> CacheSizes:
        """Choose the sizes of its context."""
        vocab_size = self.tokenizer.vocab_size
        return choose_sizes(options, self.trained_context, vocab_size, keeps_order, has_state=self.is_recurrent)


def _read_tokenizer(bindings: Bindings, address: int) -> LlamaCppTokenizer:
    vocab, pre_tokenizer = bindings.llama_model_get_vocab(address), read_pre_tokenizer(bindings, address)
    if bindings.llama_vocab_type(vocab) != bindings.LLAMA_VOCAB_TYPE_WPM:
        return LlamaCppTokenizer(bindings, vocab, pre_tokenizer)
    return WordPieceTokenizer(bindings, vocab, pre_tokenizer, read_word_rules(bindings, address))


def _open_warm(
    library: Library, model: _Model, options: LlamaCppOptions, projector: Projector | None
) -> LlamaCppRunner:
    """Return a warmed-up runner: batch-invariant if the model allows it, otherwise with the faster settings."""
    has_positions_only = not (model.window_tokens or model.is_recurrent)
    if may_be_batch_invariant(library, options, has_positions_only):
        runner = _build(library, model, options, projector, keeps_order=True)
        if is_batch_invariant(runner):
            runner.capabilities = evolve(runner.capabilities, batch_invariant=True)
            return runner
        runner.close_context()
    runner = _build(library, model, options, projector, keeps_order=False)
    is_batch_invariant(runner)  # serves as warm-up: it reads all weights and runs each kind of kernel
    return runner


def _open_warm_pooler(
    library: Library, model: _Model, options: LlamaCppOptions, pooling: PoolingType
) -> LlamaCppPooler:
    bindings, tokenizer = library.bindings, model.tokenizer
    sizes = choose_pooling_sizes(options, model.trained_context, tokenizer.vocab_size)
    info = describe_model(bindings, model.address, tokenizer, sizes.max_context)
    head = read_head(bindings, model.address, pooling, info.metadata.get("architecture", ""))
    text = read_text_layout(bindings, tokenizer.vocab)
    template = info.chat_templates.get("rerank", "") if head.task == "rerank" else ""
    pair = read_pair_layout(bindings, tokenizer, text, template) if pooling is PoolingType.RANK else None
    threads = _thread_chooser(options, SHORT_TEXT_TOKENS)

    def open_(options: LlamaCppOptions, sizes: CacheSizes) -> Context:
        return Context(library, model.address, options, sizes, threads.max_threads, pooling_type=pooling)

    context, short_context = _pooling_contexts(open_, options, sizes)
    pooler = LlamaCppPooler(
        capabilities=PoolerCapabilities(
            max_tokens=sizes.max_context,
            max_batch_tokens=sizes.batch_tokens,
            max_batch_texts=sizes.max_sequences,
            pass_tokens=min(options.n_batch, sizes.batch_tokens),
            dimensions=head.dimensions,
            text=text,
            pair=pair,
            pooling=pooling.name.lower(),
            is_normalized=options.normalize,
            dimension_choices=options.dimension_choices,
            prompts=options.prompts,
            default_prompt=options.default_prompt,
            labels=head.labels,
            activation=head.activation,
        ),
        tokenizer=tokenizer,
        info=msgspec.structs.replace(info, task=head.task, chat_templates={"rerank": template} if template else {}),
        head=head,
        context=context,
        short_context=short_context,
        batch=Batch(bindings, sizes.batch_tokens),
        threads=threads,
        log=library.log,
        free_model=lambda: bindings.llama_model_free(model.address),
    )
    try:
        pooler.warm_up()
    except BaseException:
        pooler.close_context()
        raise
    return pooler


def _pooling_contexts(
    open_: Callable[[LlamaCppOptions, CacheSizes], Context], options: LlamaCppOptions, sizes: CacheSizes
) -> tuple[Context, Context | None]:
    """Return the context for passes, and one without flash attention for single short texts.

    There is one context if ``flash_attn`` is set, or if memory suffices for one only.
    """
    context = open_(options, sizes)
    if options.flash_attn is not None:
        return context, None
    try:
        return context, open_(evolve(options, flash_attn=False), short_pooling_sizes(sizes))
    except ModelLoadError:
        return context, None


def _thread_chooser(options: LlamaCppOptions, max_tokens: int = MAX_ADAPTED_TOKENS) -> ThreadChooser:
    counts = (options.threads,) if options.threads else thread_counts(usable_cores())
    return ThreadChooser(counts, max_tokens=max_tokens)


def _build(
    library: Library, model: _Model, options: LlamaCppOptions, projector: Projector | None, *, keeps_order: bool
) -> LlamaCppRunner:
    bindings, tokenizer = library.bindings, model.tokenizer
    sizes = model.choose_sizes(options, keeps_order)
    threads = _thread_chooser(options)
    context = Context(library, model.address, options, sizes, threads.max_threads)
    memory = SequenceMemory(bindings, context.address, model.window_tokens, model.is_recurrent)
    cells = CellMap(context.num_cells, sizes.chunk_tokens)
    state_format = _state_format(library, options, sizes, projector)
    return LlamaCppRunner(
        capabilities=_capabilities(library, options, sizes, model, projector),
        tokenizer=tokenizer,
        info=describe_model(bindings, model.address, tokenizer, sizes.max_context),
        context=context,
        sequences=SequenceTable(
            memory,
            cells,
            sizes.max_sequences,
            sizes.cache_tokens,
            keeps_order,
            state_format=state_format,
            max_checkpoints=options.checkpoints,
        ),
        adapters=Adapters(library, model.address, context.address),
        projector=projector,
        batch=Batch(bindings, sizes.batch_tokens),
        threads=threads,
        log=library.log,
        free_model=lambda: bindings.llama_model_free(model.address),
        state_format=state_format,
    )


def _capabilities(
    library: Library, options: LlamaCppOptions, sizes: CacheSizes, model: _Model, projector: Projector | None
) -> RunnerCapabilities:
    uses_gpu = library.has_gpu and options.n_gpu_layers != 0
    return RunnerCapabilities(
        max_sequences=sizes.max_sequences,
        max_batch_tokens=sizes.batch_tokens,
        max_context=sizes.max_context,
        cache_tokens=sizes.cache_tokens,
        truncate="checkpoint" if model.is_recurrent else "bounded" if model.window_tokens else "any",
        fork="share",
        batch_invariant=False,
        abort=not uses_gpu,
        states=True,
        adapters="per_pass",
        media=projector.kinds if projector is not None else (),
    )


def _state_format(library: Library, options: LlamaCppOptions, sizes: CacheSizes, projector: Projector | None) -> str:
    """Identify what saved sequences depend on besides the model: library, KV storage, computation and projector."""
    cache = f"types {sizes.type_k} {sizes.type_v}, flash_attn {options.flash_attn}, swa_full {options.swa_full}"
    layers = f", num_layers {options.num_layers}" if options.num_layers is not None else ""
    rope = "".join(
        f", {name} {value}"
        for name in ("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")
        if (value := getattr(options, name)) is not None
    )
    images = f", projector {projector.identity if projector else 'none'}"
    return f"llama-cpp-python {library.version}, {cache}, batch_invariant {sizes.keeps_order}{layers}{rope}{images}"
