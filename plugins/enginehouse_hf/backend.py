"""Backend registration. Cheap to import; loads torch and transformers only in ``open``."""

from __future__ import annotations

import math
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from attrs import evolve, field, frozen, validators

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, Runner
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.contract.gguf_names import parts_of
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.types import Task
from enginehouse_backendkit.gguf_files import find_problem
from enginehouse_backendkit.model_folder import (
    DEFAULT_CONTEXT,
    ModelFolder,
    describe_pickles,
    no_folder,
    pickled_weights,
)
from enginehouse_hf.gguf_estimate import estimate_gguf
from enginehouse_hf.pooling.estimate import estimate_pooler
from enginehouse_hf.pooling.recipe import Recipe, read_recipe

__all__ = ["HfBackend", "HfOptions", "no_model"]


@frozen(kw_only=True)
class HfOptions:
    """Settings of a model of this backend.

    Attributes:
        context: longest sequence in tokens; None uses the model's own limit, at most 4096.
        slots: number of sequences that decode concurrently.
        max_batch_tokens: maximum tokens per forward pass; bounds the memory of a prefill. None is 2048 on the CPU, 8192
            on a GPU, 32768 there for a pooling model.
        device: a torch device, such as ``cpu`` or ``cuda:0``; ``auto`` is the first GPU of torch, else the CPU.
        dtype: data type of weights and KV; None is float32 on the CPU and bfloat16 elsewhere, for a pooling model
            float16 unless its files state bfloat16.
        threads: number of torch threads, for the whole process; None keeps torch's default.
        cache_tokens: KV positions over all sequences, both running and cached for reuse; None is the number that fits
            into GPU memory, on the CPU ``context`` for each slot.
        checkpoints: number of states of recurrent layers that are kept to go back to, over all sequences.
        memory_share: share of the GPU's memory that this process may use.
        type_k: data type of the keys in the KV cache: ``fp8`` is 8-bit floats with a factor per token and head, on one
            GPU; None is that of the weights.
        type_v: data type of the values, like ``type_k``.
        cuda_graphs: record decode steps as CUDA graphs while the model loads; without, each step costs some 20 ms of
            Python.
        fused: use Enginehouse's own kernels for models whose layers consist of known parts (Llama, Qwen, Gemma, OLMo,
            mixtures of experts, ...).
        device_map: spread a model over several GPUs; the value is passed to transformers (``auto``, ``balanced``, ...).
            Such a model runs layer by layer without graphs.
        quantization: quantise the weights while loading; needs the package of that name, and runs without graphs.
        quantize: round the projections of the layers to 8-bit floats with a factor per row (``fp8``), or to 4 bits with
            a factor per 128 columns (``int4``), while loading; fused layers read them in this form, elsewhere they are
            unpacked to full size. Fused layers may have the projection to logits in 8-bit integers.
        trust_remote_code: run Python code from the model's folder, and read weights stored as pickles.
        task: ``generate``, or for a pooling model ``embed``, ``rerank`` or ``classify``; None is the task that the
            model's files name.
        pooling: how an embedding is made of the states of the tokens, instead of what the model's files say: ``cls``,
            ``max``, ``mean``, ``mean_sqrt_len_tokens``, ``weightedmean`` or ``lasttoken``, or several joined by ``+``.
        dimension_choices: smaller sizes to which embeddings may be cut (Matryoshka), besides those that the model's
            files state.
        random_weights: use random weights instead of reading them, to measure speed from a ``config.json`` alone.
    """

    context: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    slots: int = field(default=8, validator=validators.ge(1))
    max_batch_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    threads: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    cache_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    checkpoints: int = field(default=32, validator=validators.ge(1))
    memory_share: float = field(default=0.9, validator=[validators.gt(0.0), validators.le(1.0)])
    type_k: Literal["fp8"] | None = None
    type_v: Literal["fp8"] | None = None
    cuda_graphs: bool = True
    fused: bool = True
    device_map: str | None = None
    quantization: Literal["bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8"] | None = None
    quantize: Literal["fp8", "int4"] | None = None
    trust_remote_code: bool = False
    task: Task | None = None
    pooling: str | None = None
    dimension_choices: tuple[int, ...] = ()
    random_weights: bool = False

    @property
    def runs_on_cuda(self) -> bool:
        """True if the CUDA runner computes the model: one NVIDIA GPU, plain weights, and Triton to compile kernels."""
        is_plain = self.device_map is None and self.quantization is None
        return is_plain and self.device.startswith("cuda") and find_spec("triton") is not None

    @property
    def prepares_linears(self) -> bool:
        """True if oneDNN computes the linear layers where it can: float32 on the CPU, plain weights."""
        is_plain = self.device_map is None and self.quantization is None
        return is_plain and self.device == "cpu" and self.dtype == "float32"

    def resolved(self, device: str, recipe: Recipe | None = None) -> HfOptions:
        """Return a copy with device-dependent defaults filled in; ``device`` replaces ``auto``.

        Args:
            recipe: of a pooling model.
        """
        device = device if self.device == "auto" else self.device
        is_cpu, is_pooler = device == "cpu", recipe is not None
        on_gpu: Literal["bfloat16", "float16"] = "bfloat16"
        if recipe is not None and not recipe.is_stored_in("bfloat16"):
            on_gpu = "float16"  # eight times closer to float32 than bfloat16: 4e-4 of a vector of length 1
        return evolve(
            self,
            device=device,
            dtype=self.dtype or ("float32" if is_cpu else on_gpu),  # bfloat16 has no fast kernels on most CPUs
            max_batch_tokens=self.max_batch_tokens or (2048 if is_cpu else 32768 if is_pooler else 8192),
        )


_one_at_a_time = threading.Lock()
"""While transformers builds a model, it changes torch's default dtype and functions of ``torch.nn.init`` for the whole
process. Models with ``isolation = "thread"`` share a process."""


class HfBackend:
    """Opens transformers models: causal ones as runners; encoders, embedders and classifiers as poolers."""

    name = "hf"
    api_version = 1
    options = HfOptions
    opens: Literal["model", "engine"] = "model"

    def probe(self) -> Probe:
        """Check that torch and transformers are installed."""
        missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
        if missing:
            return Probe(False, reason=MissingDependency(missing[0], self.name).message)
        return Probe(True, ("cpu",) if _likely_device() == "cpu" else (_likely_device(), "cpu"))

    def match(self, source: ModelSource) -> Match:
        """Return a high match for a folder of safetensors, a low one for a GGUF file, which is dequantised."""
        recipe = _recipe(source, HfOptions())
        folder = ModelFolder.find(source if recipe is None else ModelSource(source.text, recipe.transformer))
        if folder is not None:
            if folder.is_mlx_quantized:
                return Match(0.0, "quantised in MLX's own format")
            what = "a folder with config.json and safetensors"
            return Match(0.8, what if recipe is None or recipe.task == "generate" else f"{what}, for {recipe.task}")
        if _is_gguf(source) and not _gguf_problem(source):
            return Match(0.2, "a GGUF file, dequantised to full size")
        if pickles := pickled_weights(source.path):
            return Match(0.1, f"{describe_pickles(pickles)}, or set trust_remote_code = true")
        return Match(0.0, no_model(source))

    def estimate(self, source: ModelSource, options: HfOptions) -> MemoryEstimate:
        """Estimate memory from ``config.json`` or the GGUF header."""
        recipe = _recipe(source, options)
        if recipe is not None and recipe.task != "generate":
            resolved = options.resolved(_likely_device(), recipe)
            assert resolved.dtype is not None and resolved.max_batch_tokens is not None
            is_cpu = resolved.device == "cpu"
            return estimate_pooler(recipe, resolved.dtype, resolved.max_batch_tokens, is_cpu=is_cpu)
        resolved = options.resolved(_likely_device())
        dtype = resolved.dtype
        assert dtype is not None
        tokens = options.cache_tokens or options.slots * (options.context or DEFAULT_CONTEXT)
        folder = ModelFolder.find(source)
        if folder is not None:
            num_states = 2 * options.slots if resolved.device == "cpu" else 2 * (2 * options.slots + 1)
            found = folder.estimate(tokens, dtype, num_states + options.checkpoints)
            if resolved.prepares_linears:
                found = _with_prepared_output(found, folder)
            return _in_types(found, options, tokens, dtype)
        if pickles := pickled_weights(source.path):
            raise ModelLoadError(f"{source.text}: {describe_pickles(pickles)}")
        if self.match(source).score == 0.0:
            raise ModelLoadError(f"{source.text}: {self.match(source).reason}")
        assert source.path is not None
        found = estimate_gguf(source.path, tokens, dtype, copies_output=resolved.prepares_linears)
        return _in_types(found, options, tokens, dtype)

    def open(self, source: ModelSource, options: HfOptions, progress: Progress) -> Runner | Pooler:
        """Load the model on this thread; see :func:`enginehouse_hf.loader.open_runner` and ``pooling/opening.py``."""
        # transformers draws progress bars into the log; ``progress`` reports the same. tqdm reads this on import.
        os.environ.setdefault("TQDM_DISABLE", "1")
        try:
            from enginehouse_hf.loader import open_runner  # noqa: PLC0415 - imports torch
            from enginehouse_hf.pooling.opening import open_pooler  # noqa: PLC0415
        except ImportError as error:
            raise MissingDependency(error.name or "transformers", self.name) from error
        recipe = _recipe(source, options)
        with _one_at_a_time:
            if recipe is not None and recipe.task != "generate":
                return open_pooler(source, recipe, options, progress)
            return open_runner(source, options, progress)


def _recipe(source: ModelSource, options: HfOptions) -> Recipe | None:
    """Return what a folder's files say, or None for a source without such files."""
    path = source.path
    if path is None or not ((path / "modules.json").is_file() or (path / "config.json").is_file()):
        return None
    return read_recipe(path, options.task, options.pooling)


def _with_prepared_output(whole: MemoryEstimate, folder: ModelFolder) -> MemoryEstimate:
    """Count tied embeddings twice: as a table, and as the output layer in the order of oneDNN's kernels."""
    text = folder.config.get("text_config")
    config = {**folder.config, **(text if isinstance(text, dict) else {})}
    sizes = [config.get(name) for name in ("vocab_size", "hidden_size")]
    if config.get("tie_word_embeddings") is False or not all(isinstance(size, int) and size > 0 for size in sizes):
        return whole
    copied = 4 * math.prod(int(size) for size in sizes if size is not None)
    return evolve(whole, weights_bytes=whole.weights_bytes + copied, total_bytes=whole.total_bytes + copied)


def _in_types(whole: MemoryEstimate, options: HfOptions, tokens: int, dtype: str) -> MemoryEstimate:
    """Return an estimate with keys and values in the types of the options, without the factors of 8-bit floats."""
    num_packed = (options.type_k, options.type_v).count("fp8")
    saved = num_packed * whole.kv_bytes_per_token // 2 * (3 if dtype == "float32" else 2) // 4
    return evolve(
        whole, kv_bytes_per_token=whole.kv_bytes_per_token - saved, total_bytes=whole.total_bytes - tokens * saved
    )


def _is_gguf(source: ModelSource) -> bool:
    return source.path is not None and source.path.is_file() and source.path.suffix == ".gguf"


def _gguf_problem(source: ModelSource) -> str:
    """Return why a GGUF file cannot be opened: transformers reads one file and draws missing weights at random."""
    assert source.path is not None
    if len(parts_of(source.path)) > 1:
        return "a GGUF file in several parts, which transformers cannot read; llamacpp can"
    return find_problem(source.path)


def no_model(source: ModelSource) -> str:
    """Return why a source is not a model that this backend opens."""
    if _is_gguf(source):
        return _gguf_problem(source)
    is_folder = source.path is not None and source.path.is_dir()
    return no_folder(source) if is_folder else "neither a model folder nor a GGUF file"


def _likely_device() -> str:
    """Return the device that ``auto`` will select, without importing torch: the NVIDIA driver exposes a file."""
    return "cuda:0" if Path("/proc/driver/nvidia/version").exists() else "cpu"
