"""Checks of a model's files that its backend makes only when it opens them: a tokenizer, and weights that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from enginehouse.contract.errors import ModelLoadError
from enginehouse_backendkit.folder_files import check_has_tokenizer
from enginehouse_backendkit.gguf_reader import GgufReader, reading
from enginehouse_backendkit.weights_fit import find_misfit
from enginehouse_doctor.checkup import Finding

__all__ = ["check_files"]


def check_files(paths: Mapping[str, Path]) -> Iterator[Finding]:
    """Check the folders and GGUF files of models, by name."""
    for name, path in paths.items():
        try:
            if path.is_dir() and (path / "config.json").is_file():
                check_has_tokenizer(path)
                if misfit := find_misfit(path):
                    raise ModelLoadError(misfit)
            elif path.is_file() and path.suffix == ".gguf" and not _has_tokenizer(path):
                raise ModelLoadError("it has no tokenizer; convert the model again, with its tokenizer files")
        except ModelLoadError as error:
            yield Finding(f"files of {name}", "problem", error.message)


def _has_tokenizer(path: Path) -> bool:
    """True if a GGUF file holds tokens, or is a part of a model other than the first one."""
    with reading(path) as file:
        keys = [entry.key for entry in GgufReader(file).entries()]
    return "tokenizer.ggml.tokens" in keys or "general.architecture" not in keys
