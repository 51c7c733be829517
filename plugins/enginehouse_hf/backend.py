"""What the plugin registers: cheap, and free of torch and transformers until ``open``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

from attrs import field, frozen, validators

from enginehouse.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, Runner
from enginehouse.errors import MissingDependency, ModelLoadError
from enginehouse.model_folder import DEFAULT_CONTEXT, ModelFolder

__all__ = ["HfBackend", "HfOptions"]


@frozen(kw_only=True)
class HfOptions:
    """Settings of a model of this backend.

    Attributes:
        context: longest sequence in tokens; None is the model's own, at most 4096.
        slots: sequences that decode at once. As many finished ones are kept for prefix reuse.
        max_batch_tokens: most tokens in one forward pass; bounds the memory of a prefill.
        device: a torch device, such as ``cpu`` or ``cuda:0``.
        dtype: of weights and KV; None is float32 on the CPU and bfloat16 elsewhere.
        threads: torch's threads, for the whole process; None leaves torch's choice.
    """

    context: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    slots: int = field(default=8, validator=validators.ge(1))
    max_batch_tokens: int = field(default=2048, validator=validators.ge(1))
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    threads: int | None = field(default=None, validator=validators.optional(validators.ge(1)))

    @property
    def dtype_name(self) -> str:
        """The dtype in use. bfloat16 has no fast kernels on most CPUs."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


class HfBackend:
    """Opens transformers causal models as runners."""

    name = "hf"
    api_version = 1
    options = HfOptions
    opens: Literal["runner", "engine"] = "runner"

    def probe(self) -> Probe:
        """Whether torch and transformers are installed."""
        missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
        if missing:
            return Probe(False, reason=MissingDependency(missing[0], self.name).message)
        return Probe(True, ("cpu",))

    def match(self, source: ModelSource) -> Match:
        """High for a folder of safetensors; low for a GGUF file, which is dequantised."""
        folder = ModelFolder.find(source)
        if folder is not None:
            if folder.is_mlx_quantized:
                return Match(0.0, "quantised in MLX's own format")
            return Match(0.8, "a folder with config.json and safetensors")
        if source.path is not None and source.path.is_file() and source.path.suffix == ".gguf":
            return Match(0.2, "a GGUF file, dequantised to full size")
        return Match(0.0, "neither a model folder nor a GGUF file")

    def estimate(self, source: ModelSource, options: HfOptions) -> MemoryEstimate:
        """Memory from ``config.json`` or the GGUF header."""
        context = options.context or DEFAULT_CONTEXT
        folder = ModelFolder.find(source)
        if folder is not None:
            return folder.estimate(options.slots * context, options.dtype_name)
        if self.match(source).score == 0.0:
            raise ModelLoadError(f"{source.text}: neither a model folder nor a GGUF file")
        try:
            from enginehouse_hf.gguf_estimate import estimate_gguf  # noqa: PLC0415 - an optional library
        except ImportError as error:
            raise MissingDependency("gguf", self.name) from error
        assert source.path is not None
        return estimate_gguf(source.path, options.slots * context, options.dtype_name)

    def open(self, source: ModelSource, options: HfOptions, progress: Progress) -> Runner:
        """Load the model on this thread; see :func:`enginehouse_hf.loader.open_runner`."""
        # transformers draws progress bars into the log; ``progress`` tells the same. tqdm reads this when imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        try:
            from enginehouse_hf.loader import open_runner  # noqa: PLC0415 - imports torch
        except ImportError as error:
            raise MissingDependency(error.name or "transformers", self.name) from error
        return open_runner(source, options, progress)
