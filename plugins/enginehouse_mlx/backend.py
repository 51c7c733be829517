"""Backend registration. Cheap to import; loads mlx only in ``open``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Literal

from attrs import field, frozen, validators

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, Runner
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.contract.types import Task
from enginehouse_backendkit.folder_task import find_task
from enginehouse_backendkit.model_folder import DEFAULT_CONTEXT, ModelFolder, no_folder

__all__ = ["MlxBackend", "MlxOptions"]


@frozen(kw_only=True)
class MlxOptions:
    """Settings of a model of this backend.

    Attributes:
        context: longest sequence in tokens; None uses the model's own limit, at most 4096.
        slots: number of sequences that decode concurrently. As many finished ones are kept for prefix reuse.
        max_batch_tokens: maximum tokens per forward pass; bounds the memory of a prefill.
        dtype: data type of weights and KV; None keeps that of the files.
        checkpoints: number of states of recurrent layers that are kept to go back to, over all sequences.
        draws: where tokens are sampled: MLX, one step ahead, or core. None is MLX on a GPU and core elsewhere.
    """

    context: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    slots: int = field(default=8, validator=validators.ge(1))
    max_batch_tokens: int = field(default=2048, validator=validators.ge(1))
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    checkpoints: int = field(default=32, validator=validators.ge(1))
    draws: Literal["mlx", "core"] | None = None


class MlxBackend:
    """Opens mlx-lm models as runners."""

    name = "mlx"
    api_version = 1
    options = MlxOptions
    opens: Literal["model", "engine"] = "model"

    def probe(self) -> Probe:
        """Check that mlx and mlx-lm are installed."""
        missing = [package for package in ("mlx", "mlx_lm") if find_spec(package) is None]
        if missing:
            return Probe(False, reason=MissingDependency(missing[0].replace("_", "-"), self.name).message)
        return Probe(True, ("gpu",) if sys.platform == "darwin" else ("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Return the highest match for folders quantised by MLX; lower for others, above average on a Mac."""
        folder = ModelFolder.find(source)
        if folder is None:
            return Match(0.0, no_folder(source))
        if (task := find_task(folder.path, folder.config)) != "generate":
            return Match(0.0, _not_generating(task))
        if folder.is_mlx_quantized:
            return Match(1.0, "quantised in MLX's own format")
        if sys.platform == "darwin":
            return Match(0.9, "a folder with config.json and safetensors, on a Mac")
        return Match(0.5, "a folder with config.json and safetensors")

    def estimate(self, source: ModelSource, options: MlxOptions) -> MemoryEstimate:
        """Estimate memory from ``config.json`` and the sizes of the files."""
        folder = ModelFolder.find(source)
        if folder is None:
            raise ModelLoadError(f"{source.text}: {no_folder(source)}")
        tokens, num_states = (
            options.slots * (options.context or DEFAULT_CONTEXT),
            2 * options.slots + options.checkpoints,
        )
        return folder.estimate(tokens, options.dtype, num_states)

    def open(self, source: ModelSource, options: MlxOptions, progress: Progress) -> Runner:
        """Load the model on this thread; see :func:`enginehouse_mlx.loader.open_runner`."""
        folder = ModelFolder.find(source)
        if folder is not None and (task := find_task(folder.path, folder.config)) != "generate":
            raise ModelLoadError(f"{source.text}: {_not_generating(task)}")
        try:
            from enginehouse_mlx.loader import open_runner  # noqa: PLC0415 - imports mlx
        except ImportError as error:
            raise MissingDependency(error.name or "mlx-lm", self.name) from error
        return open_runner(source, options, progress)


def _not_generating(task: Task) -> str:
    return f"a model for {task}, which mlx-lm has no layers for; use the backend hf, or a GGUF file with llamacpp"
