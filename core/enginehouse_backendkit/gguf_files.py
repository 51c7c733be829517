"""Kinds of GGUF files, and the parts of a model: what can be said of a file before its model is opened.

For backends that open such files. Reads names, and the first entries of the metadata.
"""

from __future__ import annotations

from pathlib import Path

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import part_number, parts_of
from enginehouse_backendkit.gguf_reader import GgufReader, reading

__all__ = ["check_is_model", "find_problem"]

_OTHER_KINDS = {
    "mmproj": "a projector of images (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "statistics for quantisation (imatrix)",
}
_NUM_SHOWN = 3


def find_problem(path: Path) -> str:
    """Return why a file is not a model that can be opened; "" if it may be one, also if it is damaged."""
    parts = parts_of(path)
    if part_number(path) != 1:
        return f"it is not the first part of its model; give {parts[0].name}"
    missing = [part.name for part in parts if not path.with_name(part.name).exists()]
    if missing:
        shown = ", ".join(missing[:_NUM_SHOWN]) + (", ..." if len(missing) > _NUM_SHOWN else "")
        return f"{len(missing)} of its {len(parts)} parts are missing ({shown})"
    try:
        kind = _kind_of(path)
    except ModelLoadError:
        return ""
    return f"it holds {_OTHER_KINDS[kind]}, not a model; give the file of the model" if kind in _OTHER_KINDS else ""


def check_is_model(path: Path) -> None:
    """Check a file and its parts.

    Raises:
        ModelLoadError: see :func:`find_problem`.
    """
    problem = find_problem(path)
    if problem:
        raise ModelLoadError(f"{path}: {problem}")


def _kind_of(path: Path) -> str:
    """Return the ``general.type`` of a file; older projectors have only an architecture of their own."""
    with reading(path) as file:
        for entry in GgufReader(file).entries():
            if entry.key == "general.type":
                return str(entry.value)
            if entry.key == "general.architecture" and entry.value == "clip":
                return "mmproj"
            if entry.key.startswith("tokenizer."):  # what follows is long
                break
    return "model"
