"""Storage of shortened model files: next to the model, otherwise in the user's cache folder.

An existing file is used only if every byte equals what would be written now; a damaged or outdated file is rewritten.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from enginehouse.contract.backend import Progress
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular
from enginehouse.settings.limits import format_bytes
from enginehouse_llamacpp.first_layers import FirstLayers, cut_layers

__all__ = ["find_or_write"]

_UNFINISHED = ".unfinished"
_MAX_AGE_S = 3600.0  # older unfinished files were left by a process that died
_log = logging.getLogger(__name__)


def find_or_write(path: Path, num_layers: int, progress: Progress, env: Mapping[str, str] = os.environ) -> Path:
    """Return the file with the first layers of the model at ``path``; write it if necessary.

    Its name does not end in ``.gguf``, because folders of models are searched for that suffix.

    Raises:
        ModelLoadError: the model cannot be cut there, or no location is writable.
    """
    wanted = cut_layers(path, num_layers)
    name = f"{path.name}.first-{num_layers}-layers"
    digest = blake2b(os.fsencode(path.absolute()), digest_size=8).hexdigest()
    places = [folder / name for folder in (path.parent, *_user_folders(digest, env))]
    progress(0.0, f"looking for the first {num_layers} layers")
    for place in places:
        if _holds(place, wanted):
            return place
    problems = []
    for place in places:
        try:
            _write(place, wanted, progress)
        except OSError as error:
            problems.append(f"{place.parent}: {error.strerror or error}")
        else:
            _log.info("wrote %s, %s", place, format_bytes(wanted.num_bytes))
            return place
    size = format_bytes(wanted.num_bytes)
    reasons = "; ".join(problems)
    raise ModelLoadError(f"the first {num_layers} layers of {path.name} ({size}) cannot be written anywhere: {reasons}")


def _user_folders(digest: str, env: Mapping[str, str]) -> list[Path]:
    """Folder for one model in the user's cache; empty if the user has no home directory."""
    try:
        return [Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "enginehouse" / "layers" / digest]
    except RuntimeError:
        return []


def _holds(place: Path, wanted: FirstLayers) -> bool:
    """True if the file exists and is identical byte for byte."""
    try:
        with open_regular(place) as file:
            if os.fstat(file.fileno()).st_size != wanted.num_bytes:
                return False
            return all(file.read(len(chunk)) == chunk for chunk in wanted.chunks())
    except OSError:
        return False


def _write(place: Path, wanted: FirstLayers, progress: Progress) -> None:
    """Write the file atomically, readable by its owner only."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_unfinished(place)
    text = f"writing the first {wanted.num_layers} layers ({format_bytes(wanted.num_bytes)})"
    descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, f"{place.name}.", place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in wanted.chunks():
                file.write(chunk)
                progress(file.tell() / wanted.num_bytes, text)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(unfinished).unlink()
        raise


def _remove_unfinished(place: Path) -> None:
    """Remove files left by writers that were killed."""
    for file in place.parent.glob(f"*{_UNFINISHED}"):
        if file.name.startswith(place.name):
            with contextlib.suppress(OSError):
                if file.stat().st_mtime < time.time() - _MAX_AGE_S:
                    file.unlink()
