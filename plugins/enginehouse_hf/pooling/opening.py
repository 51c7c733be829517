"""Opens a pooler: weights, tokenizer and modules of a folder, the way to run them, and its capabilities."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTextEncoding

from enginehouse.contract.backend import ModelSource, Progress
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.pooler import PoolerCapabilities
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import FastTokenizer
from enginehouse_backendkit.model_folder import check_model_files, served_context
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.loader import find_files
from enginehouse_hf.pooling.layout import find_layouts, lowercase_first
from enginehouse_hf.pooling.modules import RowSteps, dense_layers
from enginehouse_hf.pooling.networks import choose_network, is_reentrant, position_offset, takes_types
from enginehouse_hf.pooling.pooler import HfPooler
from enginehouse_hf.pooling.recipe import Dense, LayerNorm, Pooling, Recipe
from enginehouse_hf.pooling.threads import PassThreads
from enginehouse_hf.tokenizer import ModelFiles, load_fast
from enginehouse_hf.weights import load_weights, mapped_errors

__all__ = ["open_pooler"]

_ENCODERS_OF_PAIRS = frozenset({"t5", "mt5", "umt5"})
"""Kinds of which only the encoder is used."""

_MAX_TEXTS = 1024
_UNKNOWN_LENGTH = 10**6  # tokenizers without a limit state a number above it


def open_pooler(source: ModelSource, recipe: Recipe, options: HfOptions, progress: Progress) -> HfPooler:
    """Load a model for embeddings, reranking or classification.

    Raises:
        MissingDependency: transformers needs a package for this kind of file that is not installed.
        ModelLoadError: any other failure.
    """
    options = options.resolved("cuda:0" if torch.cuda.is_available() else "cpu", recipe)
    files = find_files(ModelSource(source.text, recipe.transformer), options)
    for module in recipe.modules:
        if isinstance(module, Dense | LayerNorm):
            check_model_files(module.folder)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with mapped_errors(source):
        progress(0.0, "loading weights")
        model = load_weights(_kind(recipe), files, options, unused="pooler.")
        layers = dense_layers(recipe.modules, trusts_pickles=options.trust_remote_code)
        for layer in filter(None, layers):
            layer.to(model.device, model.dtype).eval()
        progress(0.8, "loading tokenizer")
        pooler = _build(files, model, recipe, layers, options)
    progress(1.0, "ready")
    return pooler


def _kind(recipe: Recipe) -> Any:
    if recipe.task != "embed":
        return AutoModelForSequenceClassification
    return AutoModelForTextEncoding if recipe.config.get("model_type") in _ENCODERS_OF_PAIRS else AutoModel


def _build(files: ModelFiles, model: Any, recipe: Recipe, layers: list[Any], options: HfOptions) -> HfPooler:
    assert options.max_batch_tokens is not None
    loaded = load_fast(files)
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if recipe.is_lowercased:
        lowercase_first(backend)
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    has_types = takes_types(model) and "token_type_ids" in loaded.model_input_names
    text, pair = find_layouts(backend, takes_types=has_types)
    if recipe.task == "rerank" and pair is None:
        raise ModelLoadError(f"{files.folder}: its tokenizer marks pairs by token types other than 0 and 1")
    max_tokens = _max_tokens(model, recipe, options, int(min(loaded.model_max_length, _UNKNOWN_LENGTH)))
    tokenizer = FastTokenizer(backend, vocab_size, (), is_decoded=False)
    has_head = recipe.task != "embed"
    num_parameters = model.num_parameters()  # before the weights are put into another order
    network = choose_network(
        model, has_head=has_head, vocab_size=vocab_size, has_types=has_types, max_tokens=max_tokens
    )
    own_size = model.config.num_labels if has_head else _dimensions(recipe, model)
    dimensions = min(own_size, recipe.truncate_dim or own_size)
    sizes = {*recipe.dimension_choices, *options.dimension_choices}
    capabilities = PoolerCapabilities(
        max_tokens=max_tokens,
        max_batch_tokens=max(options.max_batch_tokens, max_tokens),
        max_batch_texts=_MAX_TEXTS,
        pass_tokens=options.max_batch_tokens,
        dimensions=dimensions,
        text=text,
        pair=pair if has_head else None,
        pooling=recipe.pooling or "rank",
        is_normalized=recipe.is_normalized,
        dimension_choices=tuple(sorted(size for size in sizes if size < dimensions)),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        include_prompt=recipe.include_prompt,
        labels=recipe.labels,
        activation=recipe.activation,
    )
    info = ModelInfo(
        backend="hf",
        task=recipe.task,
        max_context=max_tokens,
        vocab_size=vocab_size,
        special_tokens=dict(tokenizer.special_tokens),
        metadata={
            "library": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "architecture": str(model.config.model_type),
            "parameters": str(num_parameters),
            "dtype": str(options.dtype),
            "device": options.device_map or options.device,
            "layers": f"transformers layers, {network.name}",
        },
    )
    steps = None if has_head else RowSteps(recipe.modules, layers, recipe.truncate_dim)
    device, threads = model.device, _pass_threads(model)
    return HfPooler(
        network, steps, capabilities=capabilities, tokenizer=tokenizer, info=info, device=device, threads=threads
    )


def _pass_threads(model: Any) -> PassThreads | None:
    """Return the threads that compute parts of passes, on the CPU."""
    if model.device.type != "cpu":
        return None
    threads = torch.get_num_threads()
    return PassThreads(threads) if is_reentrant(model) else PassThreads(threads, max_parts=1)


def _max_tokens(model: Any, recipe: Recipe, options: HfOptions, tokenizer_limit: int) -> int:
    """Return the longest input: the setting, else the shortest of what the files state."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = positions - position_offset(model) if isinstance(positions, int) and positions > 0 else _UNKNOWN_LENGTH
    if options.context is not None and options.context > limit:
        raise ModelLoadError(f"context = {options.context} is more than this model supports ({limit})")
    stated = min(recipe.max_tokens or _UNKNOWN_LENGTH, tokenizer_limit, limit)
    return min(limit, served_context(model.config.to_dict(), options.context, stated))


def _dimensions(recipe: Recipe, model: Any) -> int:
    """Return the width of an embedding after all modules."""
    size = int(model.config.get_text_config().hidden_size)
    for module in recipe.modules:
        if isinstance(module, Dense):
            size = module.out_features
        elif isinstance(module, Pooling):
            size *= len(module.modes)
    return size
