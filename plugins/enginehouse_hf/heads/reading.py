"""Reads the tensors of a draft head from safetensors and puts them into modules made without weights.

transformers skips these tensors when it loads a model. Names and shapes are checked here, so that a head of another
model is refused instead of drafting nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from enginehouse.contract.errors import ModelLoadError

__all__ = ["fill", "names_in", "read_tensors", "without_weights"]

_NUM_SHOWN = 3


def names_in(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder, by the name of the tensor."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def read_tensors(files: Mapping[str, Path], rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return tensors by their new names, on the CPU.

    Args:
        files: the file of each tensor.
        rename: gives the new name of a tensor, or None for one that is not wanted.
    """
    found: dict[str, Tensor] = {}
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, file in files.items():
        if (new := rename(name)) is not None:
            by_file.setdefault(file, []).append((name, new))
    for file, names in by_file.items():
        with safe_open(str(file), "pt") as tensors:
            found |= {new: tensors.get_tensor(name) for name, new in names}
    return found


@contextmanager
def without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Create modules whose parameters have no memory, to be filled by :func:`fill`; ``dtype`` is their type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], device: torch.device, what: str) -> None:
    """Put tensors into a module, in the types of its own.

    Args:
        tensors: by their names in the module.
        what: the head, for messages.

    Raises:
        ModelLoadError: the tensors have other names or shapes than those of the module.
    """
    wanted = module.state_dict()
    for problem, names in (("lacks", wanted.keys() - tensors.keys()), ("has unknown", tensors.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")
            raise ModelLoadError(f"{what} {problem} tensors: {shown}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ModelLoadError(
                f"{what}: {name} is {list(tensor.shape)}, but for this model it must be {list(wanted[name].shape)}"
            )
    own = {name: tensor.to(device, wanted[name].dtype) for name, tensor in tensors.items()}
    module.load_state_dict(own, assign=True)
    module.requires_grad_(False).eval()
