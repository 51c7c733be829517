"""Opens a model: files to a ready runner, with transformers' errors mapped to ours."""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from enginehouse.backend import ModelSource, Progress, RunnerCapabilities
from enginehouse.errors import EnginehouseError, MissingDependency, ModelLoadError
from enginehouse.model_folder import ModelFolder, recommended_parameters, served_context
from enginehouse.types import ModelInfo
from enginehouse_hf.attention import ATTENTION_NAME, KvMemory, Lane, Step, UnsupportedAttention
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.runner import HfRunner, run_model
from enginehouse_hf.tokenizer import ModelFiles, load_text

__all__ = ["open_runner"]

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def open_runner(source: ModelSource, options: HfOptions, progress: Progress) -> HfRunner:
    """Load weights and tokenizer, then prove on two tokens that every layer uses our attention.

    Raises:
        MissingDependency: transformers needs a package for this kind of file that is not installed.
        ModelLoadError: anything else.
    """
    files = _find_files(source)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        progress(0.0, "loading weights")
        model = _load_model(files, options)
        progress(0.8, "loading tokenizer")
        runner = _build(files, model, options)
    except EnginehouseError:
        raise
    except ImportError as error:
        raise MissingDependency(error.name or "a package that transformers needs", "hf") from error
    except UnsupportedAttention as error:
        raise ModelLoadError(
            f"{source.text}: this model uses {error}, which the hf backend does not support"
        ) from error
    except Exception as error:
        raise ModelLoadError(f"{source.text}: transformers cannot open it: {error}") from error
    progress(1.0, "ready")
    return runner


def _find_files(source: ModelSource) -> ModelFiles:
    if ModelFolder.find(source) is not None and source.path is not None:
        return ModelFiles(source.path)
    if source.path is not None and source.path.is_file() and source.path.suffix == ".gguf":
        return ModelFiles(source.path.parent, source.path.name)
    raise ModelLoadError(f"{source.text}: not a folder with config.json and safetensors, nor a GGUF file")


def _load_model(files: ModelFiles, options: HfOptions) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        **files.arguments, dtype=getattr(torch, options.dtype_name), attn_implementation=ATTENTION_NAME
    )
    unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise UnsupportedAttention(f"layers of the type {', '.join(sorted(unknown))}")
    return model.to(options.device).eval()


def _build(files: ModelFiles, model: Any, options: HfOptions) -> HfRunner:
    max_context = served_context(model.config.to_dict(), options.context)
    capabilities = RunnerCapabilities(
        max_sequences=2 * options.slots,
        max_batch_tokens=max(options.max_batch_tokens, options.slots),
        max_context=max_context,
        cache_tokens=options.slots * max_context,
        fork="copy",
        logits="host" if options.device == "cpu" else "device",
        abort=True,
    )
    memory = KvMemory(capabilities.max_sequences, max_context)
    vocab_size = _warm_up(model, memory)
    text = load_text(files, model, vocab_size)
    info = ModelInfo(
        backend="hf",
        max_context=max_context,
        vocab_size=vocab_size,
        chat_templates=text.chat_templates,
        special_tokens=dict(text.tokenizer.special_tokens),
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        generation_defaults=recommended_parameters(files.folder) if files.gguf_file is None else {},
        metadata={
            "library": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "architecture": str(model.config.model_type),
            "parameters": str(model.num_parameters()),
            "dtype": options.dtype_name,
            "device": options.device,
        },
    )
    return HfRunner(model, memory, capabilities, text, info)


def _warm_up(model: Any, memory: KvMemory) -> int:
    """Run two tokens; the width of a row of logits. The slot used is empty again afterwards."""
    step = Step(memory, (Lane(slot=0, start=0, begin=0, end=2),), threading.Event())
    token_ids = torch.zeros(2, dtype=torch.int64, device=model.device)
    logits = run_model(model, step, token_ids, token_ids[:1] + 1)
    config = model.config.get_text_config()
    if len(step.windows) != config.num_hidden_layers:
        raise UnsupportedAttention(f"its own attention in some of its {config.num_hidden_layers} layers")
    sliding = [i for i, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind == "sliding_attention"]
    if any(step.windows[i] is None for i in sliding):
        raise UnsupportedAttention("a sliding window that it applies by a mask only")
    return int(logits.shape[-1])
