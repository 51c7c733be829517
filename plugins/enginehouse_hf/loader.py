"""Loads a model: from files to a ready runner, with transformers' errors mapped to ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from enginehouse.contract.backend import ModelSource, Progress, Runner, RunnerCapabilities
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.folder_files import check_names
from enginehouse_backendkit.gguf_reader import check_gguf
from enginehouse_backendkit.model_folder import (
    ModelFolder,
    check_model_files,
    check_weights,
    describe_failure,
    describe_pickles,
    pickled_weights,
    recommended_parameters,
    served_context,
)
from enginehouse_hf.attention import ATTENTION_NAME, KvMemory, Segment, Step, UnsupportedAttention
from enginehouse_hf.backend import HfOptions, no_model
from enginehouse_hf.depth import exit_layers
from enginehouse_hf.facts import ModelFacts
from enginehouse_hf.heads.drafting import DraftHead
from enginehouse_hf.heads.opening import open_head
from enginehouse_hf.images.families import Family
from enginehouse_hf.images.opening import ImageSupport, find_support
from enginehouse_hf.images.reader import ImageReader
from enginehouse_hf.linears import prepare_linears, restore
from enginehouse_hf.packed import PackedLinear, num_packed
from enginehouse_hf.recurrent import Mixers, recurrent_layers
from enginehouse_hf.runner import HfRunner, run_model
from enginehouse_hf.tokenizer import ModelFiles, load_text
from enginehouse_hf.weights import load_weights, mapped_errors

__all__ = ["find_files", "open_runner"]

_log = logging.getLogger(__name__)

_MAX_ERROR = 1e-3
"""Largest difference of logits, as a share of the largest one, by which a model with oneDNN's layers may differ."""

_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_RECURRENT = frozenset({"linear_attention", "conv"})
_BOTH = frozenset({"hybrid"})
_NEITHER = frozenset({"mlp", "moe"})
"""Types of layers, as transformers names them in ``layer_types``."""


def open_runner(source: ModelSource, options: HfOptions, progress: Progress) -> Runner:
    """Load weights and tokenizer, then verify with two tokens that every layer uses our attention.

    Raises:
        MissingDependency: transformers needs a package for this kind of file that is not installed.
        ModelLoadError: any other failure.
    """
    options = options.resolved("cuda:0" if torch.cuda.is_available() else "cpu")
    files = find_files(source, options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with mapped_errors(source):
        progress(0.0, "loading weights")
        images = find_support(files, options)
        model = _load_model(files, options, images.family if images.reads_images else None)
        progress(0.8, "loading tokenizer")
        runner = _build(files, model, options, progress, images)
    progress(1.0, "ready")
    return runner


def find_files(source: ModelSource, options: HfOptions) -> ModelFiles:
    """Check the files of a model, and return where they are. Raises ModelLoadError."""
    path, trusts = source.path, options.trust_remote_code
    if path is not None and (ModelFolder.find(source) is not None or _is_config(source, options)):
        check_model_files(path)
        check_weights(path)
        if not options.random_weights:
            check_names(path, "model.safetensors")
        return ModelFiles(path, trust_remote_code=trusts)
    if path is not None and (pickles := pickled_weights(path)):
        if not trusts:
            hint = "or set trust_remote_code = true if you trust their author"
            raise ModelLoadError(f"{source.text}: {describe_pickles(pickles)}, {hint}")
        check_model_files(path)
        return ModelFiles(path, trust_remote_code=trusts)
    if path is not None and path.is_file() and path.suffix == ".gguf" and not no_model(source):
        check_gguf(path)
        return ModelFiles(path.parent, path.name, trusts)
    raise ModelLoadError(f"{source.text}: {no_model(source)}")


def _is_config(source: ModelSource, options: HfOptions) -> bool:
    return options.random_weights and source.path is not None and (source.path / "config.json").is_file()


def _load_model(files: ModelFiles, options: HfOptions, images: Family | None) -> Any:
    keeps_packed = options.runs_on_cuda and options.fused
    kind = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
    for name in ("type_k", "type_v"):
        if getattr(options, name) is not None and not options.runs_on_cuda:
            raise ModelLoadError(f'{name} = "fp8" is for one NVIDIA GPU, without device_map and quantization')
    model = load_weights(kind, files, options, attention=ATTENTION_NAME, keeps_packed=keeps_packed)
    if images is not None:
        model.set_attn_implementation({"vision_config": images.attention})
    unknown = set(_layer_types(model)) - _ATTENTION - _RECURRENT - _BOTH - _NEITHER
    if unknown:
        raise UnsupportedAttention(f"layers of the type {', '.join(sorted(unknown))}")
    return model


def _build(files: ModelFiles, model: Any, options: HfOptions, progress: Progress, images: ImageSupport) -> Runner:
    mixers = _find_mixers(files, model, options)
    facts, probed = _find_facts(model, mixers, served_context(model.config.to_dict(), options.context))
    text = load_text(files, model, facts.vocab_size)
    metadata = {
        "library": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "architecture": str(model.config.model_type),
        "parameters": str(model.num_parameters() + num_packed(model)),
        "dtype": str(options.dtype),
        "device": options.device_map or options.device,
        **{name: kind for name in ("type_k", "type_v") if (kind := getattr(options, name)) is not None},
    }
    reader, of_images = images.open(files, model, text, facts)
    metadata |= of_images
    info = _info(files, text, facts, metadata)

    def load_head(source: ModelSource | None) -> DraftHead:
        return open_head(source, files, model, facts.vocab_size)

    if options.runs_on_cuda:
        from enginehouse_hf.cuda.fused import FusedNetwork  # noqa: PLC0415 - imports triton
        from enginehouse_hf.cuda.opening import open_on_cuda  # noqa: PLC0415
        from enginehouse_hf.cuda.runner import CudaRunner  # noqa: PLC0415

        opened, capabilities = open_on_cuda(model, facts, mixers, options, progress, reader)
        graphs = "" if opened.graphs.largest else ", without graphs"
        metadata |= {"layers": f"{opened.network.name}{graphs}", "attention": opened.attention}
        if opened.network.name == FusedNetwork.name and not facts.states:  # recurrent modules run as they are
            _drop_weights(model)
        return CudaRunner(
            opened,
            capabilities,
            text,
            info,
            state_format=_state_format(metadata, facts, options, reader),
            load_head=load_head,
            reader=reader,
        )
    metadata["layers"] = "transformers layers, step by step"
    if options.prepares_linears and _prepare(model, mixers):
        metadata["layers"] += ", products by oneDNN"
    capabilities = _capabilities(facts, options, () if facts.states else exit_layers(model), reader)
    memory = probed.resized(capabilities.max_sequences, facts.max_context)
    return HfRunner(
        model,
        memory,
        capabilities,
        text,
        info,
        facts=facts,
        mixers=mixers,
        state_format=_state_format(metadata, facts, options, reader),
        num_checkpoints=options.checkpoints,
        load_head=load_head,
        reader=reader,
    )


def _prepare(model: Any, mixers: Mixers) -> bool:
    """Let oneDNN compute the linear layers of the text model and its output; return whether it does.

    All stay as they were if a module of the model reads the weights of one, or if the logits of two tokens change.
    """
    expected = _run_two_tokens(model, mixers)[0]
    others = [module for name, module in model.named_modules() if name in mixers.names]
    replaced = prepare_linears(model.get_decoder(), others)
    replaced += prepare_linears(model, only=model.get_output_embeddings())
    if not replaced:
        return False
    try:
        error = float((_run_two_tokens(model, mixers)[0] - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        problem = "" if error <= _MAX_ERROR else f"logits differ by {error:.2g} of the largest"
    except Exception as failure:  # noqa: BLE001 - models fail in their own ways at what they do not support
        problem = describe_failure(failure)
    if problem:
        _log.warning("hf: oneDNN's layers are not used: %s", problem)
        restore(replaced)
    return not problem


def _info(files: ModelFiles, text: ModelText, facts: ModelFacts, metadata: dict[str, str]) -> ModelInfo:
    """Describe the model; ``metadata`` may still grow."""
    return ModelInfo(
        backend="hf",
        max_context=facts.max_context,
        vocab_size=facts.vocab_size,
        chat_templates=text.chat_templates,
        special_tokens=dict(text.tokenizer.special_tokens),
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        generation_defaults=recommended_parameters(files.folder) if files.gguf_file is None else {},
        metadata=metadata,
    )


def _drop_weights(model: Any) -> None:
    """Release the weights of the layers: other layers compute with them, and may hold them in another form."""
    layers = model.get_decoder().layers.to("meta")
    for module in layers.modules():
        if isinstance(module, PackedLinear):
            del module.packed


def _find_mixers(files: ModelFiles, model: Any, options: HfOptions) -> Mixers:
    """Take over the recurrent layers of a model. Raises ModelLoadError where these are not computed."""
    layers = recurrent_layers(model)
    on_cpu = options.device == "cpu" and options.device_map is None and options.quantization is None
    if layers and not (on_cpu or options.runs_on_cuda):
        raise ModelLoadError(
            f"{files.folder}: hf computes recurrent layers, such as its layer {min(layers)}, on the CPU, or on one "
            'NVIDIA GPU with Triton, without device_map and quantization; set device = "cpu"'
        )
    return Mixers(model)  # runs the modules


def _state_format(
    metadata: Mapping[str, str], facts: ModelFacts, options: HfOptions, reader: ImageReader | None
) -> str:
    """Identify what saved sequences depend on besides the model's files: runner and data layout."""
    computed = ", ".join(f"{name} {metadata[name]}" for name in ("library", "architecture", "dtype", "layers"))
    device = "cuda" if options.runs_on_cuda else "any device"
    kinds = f"quantization {options.quantization} {options.quantize}, KV {options.type_k} {options.type_v}"
    images = "" if reader is None else f", images {reader.identity}"
    return f"{computed}, {device}, {kinds}, layers {facts.layers} {facts.windows} {facts.states}{images}"


def _capabilities(
    facts: ModelFacts, options: HfOptions, depths: tuple[int, ...], reader: ImageReader | None
) -> RunnerCapabilities:
    assert options.max_batch_tokens is not None
    return RunnerCapabilities(
        max_sequences=2 * options.slots,
        max_batch_tokens=max(options.max_batch_tokens, options.slots),
        max_context=facts.max_context,
        cache_tokens=options.cache_tokens or options.slots * facts.max_context,
        truncate="checkpoint" if facts.states else "any",
        fork="copy",
        exit_layers=depths,
        abort=True,
        states=not options.random_weights,  # the next process would use different random weights
        adapters="mixed",
        media=("image",) if reader is not None else (),
    )


def _layer_types(model: Any) -> Sequence[str]:
    """Return the type of every layer; empty for a model whose layers all have attention."""
    return getattr(model.config.get_text_config(), "layer_types", None) or ()


def _run_two_tokens(model: Any, mixers: Mixers) -> tuple[torch.Tensor, KvMemory, Step]:
    """Run two tokens from an empty state; return their (1, vocab_size) logits, and the memory and step of this run."""
    memory = KvMemory(num_slots=1, max_context=2)
    step = Step(memory, (Segment(slot=0, start=0, begin=0, end=2),), threading.Event())
    token_ids = torch.zeros(2, dtype=torch.int64, device=model.device)
    mixers.begin(step)
    logits = run_model(model, step, token_ids, [1])
    mixers.commit()
    return logits, memory, step


def _find_facts(model: Any, mixers: Mixers, max_context: int) -> tuple[ModelFacts, KvMemory]:
    """Run two tokens and record the attention parameters of each layer; also return the memory of this run."""
    logits, memory, step = _run_two_tokens(model, mixers)
    types = _layer_types(model) or ["full_attention"] * model.config.get_text_config().num_hidden_layers
    states = mixers.forms(0)
    mixers.put(0, {})
    for number, whose, what in (
        (len(step.windows), _ATTENTION | _BOTH, "attention"),
        (len({form.key[0] for form in states}), _RECURRENT | _BOTH, "recurrence"),
    ):
        if number != sum(kind in whose for kind in types):
            raise UnsupportedAttention(f"its own {what} in some of its {len(types)} layers")
    sliding = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
    if any(step.windows[i] is None for i in sliding):
        raise UnsupportedAttention("a sliding window that it applies by a mask only")
    vocab_size = int(logits.shape[-1])
    facts = ModelFacts(tuple(memory.shapes), dict(step.windows), vocab_size, max_context, step.has_sinks, states)
    return facts, memory
