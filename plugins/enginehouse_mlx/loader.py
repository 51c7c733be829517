"""Loads a model: from a folder to a ready runner, with mlx-lm's errors mapped to ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from enginehouse.contract.backend import ModelSource, Progress, RunnerCapabilities
from enginehouse.contract.errors import EnginehouseError, MissingDependency, ModelLoadError
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText, check_tokenizer_file
from enginehouse_backendkit.folder_files import check_has_tokenizer, check_names, has_only_tekken
from enginehouse_backendkit.model_folder import (
    ModelFolder,
    check_weights,
    describe_failure,
    describe_pickles,
    no_folder,
    pickled_weights,
    recommended_parameters,
    served_context,
)
from enginehouse_backendkit.tekken import tekken_text
from enginehouse_mlx.backend import MlxOptions
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.config import older_keys
from enginehouse_mlx.depth import find_layers
from enginehouse_mlx.drawing import DrawingRunner
from enginehouse_mlx.exiting import ExitingRunner
from enginehouse_mlx.halves import cut_model
from enginehouse_mlx.runner import MlxRunner
from enginehouse_mlx.sampling import SUPPORTED
from enginehouse_mlx.tokenizer import wrap_text

__all__ = ["open_runner"]


def open_runner(source: ModelSource, options: MlxOptions, progress: Progress) -> MlxRunner:
    """Load weights and tokenizer, then test how the model may be called.

    Raises:
        MissingDependency: mlx-lm needs a package for this model that is not installed.
        ModelLoadError: any other failure.
    """
    folder = ModelFolder.find(source)
    if folder is None and (pickles := pickled_weights(source.path)):
        raise ModelLoadError(f"{source.text}: {describe_pickles(pickles)}")
    if folder is None:
        raise ModelLoadError(f"{source.text}: {no_folder(source)}")
    try:
        progress(0.0, "loading weights")
        model, read_text = _load(folder)
        if options.dtype is not None:
            model.set_dtype(getattr(mx, options.dtype))
        progress(0.8, "warming up")
        runner = _build(folder, model, read_text, options)
    except EnginehouseError:
        raise
    except ImportError as error:
        if error.name is None:  # the library's own message names the package
            raise ModelLoadError(f"{source.text}: mlx-lm cannot open it: {error}") from error
        raise MissingDependency(error.name, "mlx") from error
    except Exception as error:
        raise ModelLoadError(f"{source.text}: mlx-lm cannot open it: {describe_failure(error)}") from error
    progress(1.0, "ready")
    return runner


def _load(folder: ModelFolder) -> tuple[Any, Callable[[int], ModelText]]:
    """Load mlx-lm's model, and return the function from its vocabulary size to its tokenizer.

    Code from the folder is never run.
    """
    if code := folder.config.get("model_file"):
        raise ModelLoadError(f"{folder.path}: it brings Python code of its own ({code!r}), which is not run")
    check_tokenizer_file(folder.path)
    check_has_tokenizer(folder.path)
    check_weights(folder.path)
    check_names(folder.path, "model*.safetensors")
    if has_only_tekken(folder.path):
        model, config = load_model(folder.path, model_config=older_keys(folder.config))
        ends = config.get("eos_token_id") or []
        ends = [ends] if isinstance(ends, int) else ends
        return model, partial(tekken_text, folder.path, end_token_ids=ends, from_str=Tokenizer.from_str)
    loaded: Any = mlx_lm.load(
        str(folder.path), tokenizer_config={"trust_remote_code": False}, model_config=older_keys(folder.config)
    )
    return loaded[0], partial(wrap_text, loaded[1], folder=folder.path)


def _quantization(folder: ModelFolder) -> dict[str, str]:
    """Describe the quantisation in MLX's own format; empty if the weights are not quantised."""
    packed = folder.config.get("quantization")
    if not isinstance(packed, dict):
        return {}
    return {"quantization": f"{packed.get('bits')} bits, groups of {packed.get('group_size')}"}


def _build(folder: ModelFolder, model: Any, read_text: Callable[[int], ModelText], options: MlxOptions) -> MlxRunner:
    memory = SlotMemory(model)
    max_context = served_context(_without_lost_windows(folder.config, memory), options.context)
    draws = options.draws or ("mlx" if mx.default_device().type == mx.DeviceType.gpu else "core")
    halves, vocab_size = cut_model(model)
    layered = find_layers(model, halves, memory)
    capabilities = RunnerCapabilities(
        max_sequences=2 * options.slots,
        max_batch_tokens=max(options.max_batch_tokens, options.slots),
        max_context=max_context,
        cache_tokens=options.slots * max_context,
        truncate="checkpoint" if memory.states else "any",
        fork="copy",
        sampling=SUPPORTED if draws == "mlx" else frozenset(),
        exit_layers=layered.exit_layers,
        states=True,
        adapters="mixed",
    )
    text = read_text(vocab_size)
    parameters = dict(tree_flatten(model.parameters()))
    info = ModelInfo(
        backend="mlx",
        max_context=max_context,
        vocab_size=vocab_size,
        chat_templates=text.chat_templates,
        special_tokens=dict(text.tokenizer.special_tokens),
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        generation_defaults=recommended_parameters(folder.path),
        metadata={
            "library": f"mlx-lm {mlx_lm.__version__}, mlx {mx.__version__}",
            **_quantization(folder),
            **_images(folder),
            "architecture": str(folder.config.get("model_type", "")),
            "weights_bytes": str(sum(array.nbytes for array in parameters.values())),
            "device": str(mx.default_device()),
            "draws": draws,
        },
    )
    runner = DrawingRunner if draws == "mlx" else ExitingRunner
    return runner(layered, memory, capabilities, text, info, max_checkpoints=options.checkpoints)


def _images(folder: ModelFolder) -> dict[str, str]:
    """Say of a model that reads images that it takes text only here."""
    if "vision_config" not in folder.config:
        return {}
    return {"images": "none: mlx-lm computes only the text part of this model; hf and llamacpp read images"}


def _without_lost_windows(config: dict[str, Any], memory: SlotMemory) -> dict[str, Any]:
    """Return the configuration with a context in which mlx-lm's class of the model is correct.

    A few classes (Gemma 2) give all layers full attention although some should use a window. Up to the length of that
    window the results are the same.
    """
    text = config.get("text_config") or config
    has_windows = text.get("sliding_window") and (
        "sliding_attention" in (text.get("layer_types") or ()) or text.get("model_type") == "gemma2"
    )
    if not has_windows or any(layer.window for layer in memory.layers):
        return config
    limit = min(text["sliding_window"], text.get("max_position_embeddings") or text["sliding_window"])
    return {**text, "max_position_embeddings": limit}
