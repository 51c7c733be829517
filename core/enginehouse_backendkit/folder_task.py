"""The task of a Hugging Face style model folder, by its JSON files: generate, embed, rerank or classify.

Called by backends that load such folders, to match a source before their library is imported. Knows names of files and
architectures, not weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import Task
from enginehouse_backendkit.folder_files import read_object

__all__ = ["architecture_of", "find_task", "num_labels"]

_ENCODERS = ("ForMaskedLM", "ForPreTraining", "Model")
_CLASSIFIER = "ForSequenceClassification"
_MAX_LABELS = 2**20


def find_task(folder: Path, config: Mapping[str, Any]) -> Task:
    """Return the task.

    Args:
        folder: the model's folder, with ``modules.json`` if sentence-transformers has written it.
        config: the contents of the transformer's ``config.json``.

    Raises:
        ModelLoadError: it is a model of sentence-transformers of an unsupported kind, or a file is damaged.
    """
    kind = ""
    if (folder / "modules.json").is_file():
        settings = folder / "config_sentence_transformers.json"
        kind = str((read_object(settings) if settings.is_file() else {}).get("model_type", "SentenceTransformer"))
    if kind == "SentenceTransformer":
        return "embed"
    if kind not in {"", "CrossEncoder"}:
        raise ModelLoadError(
            f"{folder}: a {kind[:40]} of sentence-transformers is not supported; SentenceTransformer and "
            "CrossEncoder are"
        )
    architecture = architecture_of(config)
    if architecture.endswith(_CLASSIFIER):
        return "rerank" if num_labels(folder, config) == 1 else "classify"
    return "embed" if architecture.endswith(_ENCODERS) and not kind else "generate"


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first of ``architectures``; empty if there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def num_labels(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the number of labels of a classifier; transformers' default is 2. Raises ModelLoadError if it is none."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    number = config.get("num_labels", 2)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= _MAX_LABELS:
        raise ModelLoadError(f"{folder}: num_labels is {str(number)[:40]!r}, which is not a size")
    return number
