"""Names of GGUF files: the quantisation in ``model-Q4_K_M.gguf``, and parts of split models. Reads no files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from enginehouse.contract.errors import ModelLoadError

__all__ = [
    "choose_gguf",
    "choose_name",
    "choose_projector",
    "is_beside",
    "is_quantization",
    "model_in",
    "part_number",
    "parts_of",
    "quantization_of",
    "stem_of",
]

_MAX_DEPTH = 2
_MAX_ENTRIES = 10_000
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_BESIDE = re.compile(r"(?<![a-z])(mmproj|imatrix)(?![a-z])|^ggml-vocab-")  # projectors of images, statistics
_PROJECTOR = re.compile(r"(?<![a-z])mmproj(?![a-z])")
_PUBLISHERS = re.compile(r"(?<=[-._])(ud|i1)[-._]$")  # before the quantisation, as in UD-Q4_K_XL
_PROJECTOR_KINDS = ("F16", "BF16", "Q8_0", "F32")  # by preference: they are small, and lose much when they are coarser
_QUANTIZATION = re.compile(r"(?<![0-9A-Za-z])(I?Q\d+(?:_[0-9A-Za-z]+)*|TQ\d_\d|MXFP4|BF16|F16|F32)$", re.IGNORECASE)


def quantization_of(file: PurePath) -> str | None:
    """Return the quantisation in a file name, in capitals; None if there is none."""
    found = _QUANTIZATION.search(stem_of(file))
    return found[1].upper() if found else None


def is_quantization(text: str) -> bool:
    """True if ``text`` names a quantisation, possibly with a publisher's prefix (``UD-Q4_K_XL``)."""
    return _QUANTIZATION.search(text) is not None


def choose_gguf(folder: Path, wanted: str | None, text: str) -> Path | None:
    """Return the model in ``folder``, or the first part of a split one; None if it holds no GGUF file.

    Args:
        wanted: the quantisation, case-insensitive; None selects the only model.
        text: the user's text, for messages.

    Raises:
        ModelLoadError: no file or several files have that quantisation; lists the available ones.
    """
    found = choose_name((file.relative_to(folder) for file in _files_in(folder, text)), wanted, text)
    return None if found is None else folder / found


def _files_in(folder: Path, text: str) -> list[Path]:
    """Return the GGUF files in a folder and two levels of folders in it, as repositories of a hub have them.

    Raises:
        ModelLoadError: it is too large for the folder of a model, such as a home folder.
    """
    found, num_entries, waiting = list[Path](), 0, [(folder, 0)]
    while waiting:
        current, depth = waiting.pop()
        try:
            entries = list(os.scandir(current))
        except OSError:
            continue
        num_entries += len(entries)
        if num_entries > _MAX_ENTRIES:
            raise ModelLoadError(f"{text!r}: a folder of more than {_MAX_ENTRIES} files; give that of one model")
        found += [Path(entry) for entry in entries if entry.name.lower().endswith(".gguf")]
        if depth < _MAX_DEPTH:
            waiting += [(Path(entry), depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def model_in(path: Path, wanted: str | None, text: str) -> Path:
    """Return the model at ``path``: the path itself, or the GGUF file in a folder of such files.

    Args:
        wanted: as for :func:`choose_gguf`; None also selects the folder of a model in another format.
        text: the user's text, for messages.

    Raises:
        ModelLoadError: as for :func:`choose_gguf`, or the folder has no GGUF file and one is wanted.
    """
    if not path.is_dir() or (wanted is None and (path / "config.json").is_file()):
        return path
    file = choose_gguf(path, wanted, text)
    if file is None and wanted is not None:
        raise ModelLoadError(f"{text!r}: no GGUF files of which to pick {wanted!r}")
    return file or path


def choose_name(names: Iterable[PurePath], wanted: str | None, text: str) -> PurePath | None:
    """Choose among names, like :func:`choose_gguf`."""
    names = list(names)
    files = sorted(name for name in names if _is_model(name))
    if not files:
        _check_parts(names, text)
        return None
    matching = [file for file in files if wanted is None or _is_of(file, wanted.upper())]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise ModelLoadError(f"{text!r}: no GGUF file there is {wanted}; there are: {_listed(files)}")
    if wanted is None:
        how = f"name one, as in {text}:Q4_K_M" if any(map(quantization_of, files)) else "give the path of one"
        raise ModelLoadError(f"{text!r} holds several models; {how}. There are: {_listed(files)}")
    raise ModelLoadError(f"{text!r}: several files are {wanted} ({_names(matching)}); give the path of one")


def choose_projector(model: PurePath, names: Iterable[PurePath]) -> PurePath | None:
    """Return the projector of images of ``model`` among the files of its folder; None if there is none.

    It is named like the model, without the quantisations; or it is the only one, of any name, if the folder has no
    other model. Of several quantisations, F16 is preferred.

    Raises:
        ModelLoadError: several may be meant.
    """
    files = sorted(name for name in names if name.parent == model.parent and name.suffix.lower() == ".gguf")
    projectors = [file for file in files if _PROJECTOR.search(file.stem.lower())]
    found = [file for file in projectors if _name_of(file) == _name_of(model)]
    if not found and {_name_of(file) for file in files if _is_model(file)} <= {_name_of(model)}:
        found = projectors
    if len({_name_of(file) for file in found}) > 1:
        raise ModelLoadError(f"{model}: several projectors may be meant ({_names(found)}); set mmproj to one, or to ''")
    kinds = {quantization_of(file): file for file in reversed(found)}
    return next((kinds[kind] for kind in (*_PROJECTOR_KINDS, *kinds) if kind in kinds), None)


def _name_of(file: PurePath) -> str:
    """Return the name of a model, or of the model of a projector, in lower case: the file's without quantisation."""
    stem = stem_of(file)
    name = stem[: len(stem) - len(quantization_of(file) or "")].lower()
    return _PROJECTOR.sub("", _PUBLISHERS.sub("", name)).strip("-._")


def parts_of(first: PurePath) -> list[PurePath]:
    """Return all files of the model whose first file is ``first``: itself, or all parts in order."""
    part = _PART.search(first.stem)
    if part is None:
        return [first]
    return [
        first.with_name(f"{stem_of(first)}-{number:05}-of-{part[2]}{first.suffix}")
        for number in range(1, int(part[2]) + 1)
    ]


def part_number(file: PurePath) -> int:
    """Return the number of a part of a model, from 1; 1 for a file that is not a part."""
    part = _PART.search(file.stem)
    return 1 if part is None else int(part[1])


def is_beside(file: PurePath) -> bool:
    """True if a name is that of a GGUF file beside models: a projector of images, statistics, or a vocabulary."""
    return _BESIDE.search(file.stem.lower()) is not None


def _is_model(file: PurePath) -> bool:
    """True if a file is a model or its first part; False for the files beside them that are not models."""
    return file.suffix.lower() == ".gguf" and part_number(file) == 1 and not is_beside(file)


def _check_parts(names: Iterable[PurePath], text: str) -> None:
    """Raise ModelLoadError if the files are parts of models without their first parts."""
    for name in sorted(names):
        if name.suffix.lower() == ".gguf" and part_number(name) > 1:
            first = parts_of(name)[0].name
            raise ModelLoadError(f"{text!r}: it has parts of a model, but the first one is missing ({first})")


def _is_of(file: PurePath, wanted: str) -> bool:
    return quantization_of(file) == wanted or stem_of(file).upper().endswith((f"-{wanted}", f".{wanted}"))


def stem_of(file: PurePath) -> str:
    """Return a file's name without its suffix and part number."""
    return _PART.sub("", file.stem)


def _listed(files: Iterable[PurePath]) -> str:
    return ", ".join(dict.fromkeys(quantization_of(file) or file.as_posix() for file in files))


def _names(files: Iterable[PurePath]) -> str:
    return ", ".join(file.name for file in files)
