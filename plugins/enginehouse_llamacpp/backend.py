"""Backend registration. Cheap to import; loads ``llama_cpp`` only in ``open``."""

from __future__ import annotations

from typing import Literal

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, Runner
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse.contract.pooler import Pooler
from enginehouse_backendkit.gguf_files import find_problem
from enginehouse_llamacpp.estimate import estimate_memory, estimate_pooler
from enginehouse_llamacpp.first_layers import count_layers, cut_layers
from enginehouse_llamacpp.gguf import is_gguf, read_header
from enginehouse_llamacpp.layer_files import find_or_write
from enginehouse_llamacpp.library import is_installed, load_library
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.pooling_type import find_pooling
from enginehouse_llamacpp.projector_files import find_projector

__all__ = ["LlamaCppBackend"]


class LlamaCppBackend:
    """Opens GGUF files: pooling models as poolers, others as runners."""

    name = "llamacpp"
    api_version = 1
    options = LlamaCppOptions
    opens: Literal["model", "engine"] = "model"

    def probe(self) -> Probe:
        """Check that llama-cpp-python is installed."""
        if not is_installed():
            return Probe(False, reason=MissingDependency("llama-cpp-python", self.name).message)
        return Probe(True, ("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Return a high match for GGUF files, detected by their magic bytes."""
        if source.path is None or not source.path.is_file():
            is_folder = source.path is not None and source.path.is_dir()
            return Match(0.0, "a folder without GGUF files" if is_folder else "not a file")
        if not is_gguf(source.path):
            return Match(0.0, "not a GGUF file")
        problem = find_problem(source.path)
        return Match(0.0, problem) if problem else Match(1.0, "a GGUF file")

    def estimate(self, source: ModelSource, options: LlamaCppOptions) -> MemoryEstimate:
        """Estimate memory from the file's metadata."""
        if source.path is None:
            raise ModelLoadError(f"{source.text}: not a file")
        header = read_header(source.path)
        if find_pooling(header, options) is not None:
            return estimate_pooler(header, options)
        if options.num_layers is not None:
            header = header.with_layers(options.num_layers, cut_layers(source.path, options.num_layers).num_bytes)
            return estimate_memory(header, options)
        return estimate_memory(header, options, find_projector(source.path, options.mmproj))

    def count_layers(self, source: ModelSource) -> int:
        """Number of layers in the file, if its first layers can be used as a separate model."""
        if source.path is None:
            raise ModelLoadError(f"{source.text}: not a file")
        return count_layers(source.path)

    def open(self, source: ModelSource, options: LlamaCppOptions, progress: Progress) -> Runner | Pooler:
        """Load the model on this thread; see :mod:`enginehouse_llamacpp.loader`."""
        library = load_library()
        from enginehouse_llamacpp.loader import open_pooler, open_runner  # noqa: PLC0415 - the library, only here

        if source.path is None:
            raise ModelLoadError(f"{source.text}: not a file; llama.cpp needs the path of a GGUF file")
        path = source.path
        if is_gguf(path) and (pooling := find_pooling(read_header(path), options)) is not None:
            return open_pooler(library, path, options, pooling, progress)
        if options.num_layers is not None:  # drafts, which are of text
            return open_runner(library, find_or_write(path, options.num_layers, progress), options, progress)
        return open_runner(library, path, options, progress, find_projector(path, options.mmproj))
