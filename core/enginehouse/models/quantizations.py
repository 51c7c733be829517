"""A folder of GGUF files -> the file that is meant, by the name of its quantisation.

Names are all that is looked at: publishers write the quantisation before ``.gguf``, as in ``model-Q4_K_M.gguf``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from enginehouse.errors import ModelLoadError

__all__ = ["choose_gguf", "quantization_of"]

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANTIZATION = re.compile(r"(?<![0-9A-Za-z])(I?Q\d+(?:_[0-9A-Za-z]+)*|TQ\d_\d|MXFP4|BF16|F16|F32)$", re.IGNORECASE)


def quantization_of(file: Path) -> str | None:
    """The quantisation in a file's name, in capitals; None where it names none."""
    found = _QUANTIZATION.search(_stem(file))
    return found[1].upper() if found else None


def choose_gguf(folder: Path, wanted: str | None, text: str) -> Path | None:
    """The model in ``folder``, the first part of one that is split; None where it holds no GGUF file.

    Args:
        wanted: the quantisation, in any case; None takes the only model there is.
        text: what the user wrote, for messages.

    Raises:
        ModelLoadError: none or several files are of that quantisation; says which there are.
    """
    files = sorted(file for file in folder.glob("**/*.gguf") if _is_model(file))
    if not files:
        return None
    matching = [file for file in files if wanted is None or quantization_of(file) == wanted.upper()]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ModelLoadError(f"{text!r}: no GGUF file there is {wanted}; there are: {_listed(files)}")
    if wanted is None:
        raise ModelLoadError(
            f"{text!r} holds several models; name one, as in {text}:Q4_K_M. There are: {_listed(files)}"
        )
    raise ModelLoadError(f"{text!r}: several files are {wanted} ({_names(matching)}); give the path of one")


def _is_model(file: Path) -> bool:
    """Whether a file is a model or its first part; projectors of vision models lie beside their models."""
    part = _PART.search(file.stem)
    return (part is None or int(part[1]) == 1) and not file.name.lower().startswith("mmproj")


def _stem(file: Path) -> str:
    return _PART.sub("", file.stem)


def _listed(files: Iterable[Path]) -> str:
    return ", ".join(quantization_of(file) or file.name for file in files)


def _names(files: Iterable[Path]) -> str:
    return ", ".join(file.name for file in files)
