"""Opens the disk tier of a model's prefix cache in its worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from enginehouse.contract.backend import Runner, StateKeeper
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import open_regular
from enginehouse.engine.disk import DiskTier, FolderTaken, StateFolder
from enginehouse.workers.messages import Load, PrefixDiskLoad

__all__ = ["model_digest", "open_disk"]

_DIGEST_BYTES = 16
_PROBE_BYTES = 2**20
_log = logging.getLogger(__name__)


def open_disk(load: PrefixDiskLoad, model: Load, runner: Runner) -> DiskTier | None:
    """The tier; None while another process uses the folder, for this is an optimisation only.

    Raises:
        ModelLoadError: the runner's sequences cannot be saved, or the folder cannot be used.
    """
    if not isinstance(runner, StateKeeper) or not runner.capabilities.states:
        raise ModelLoadError(
            f"{load.setting}: the backend {model.backend!r} cannot save sequences of this model; remove the setting, "
            "or use a backend that can (docs/prefix-cache.md names them)"
        )
    digest = model_digest(model, runner.state_format)
    can_cut = runner.capabilities.truncate == "any"
    try:
        folder = StateFolder(Path(load.folder), digest, load.max_bytes, can_cut=can_cut)
    except FolderTaken:
        _log.warning("%s: another process uses %s; nothing is saved or loaded by this one", load.setting, load.folder)
        return None
    except OSError as error:
        raise ModelLoadError(f"{load.setting}: {load.folder} cannot be used: {error.strerror}") from error
    _log.info("%d saved sequences in %s", len(folder), load.folder)
    return DiskTier(runner, folder)


def model_digest(model: Load, state_format: str) -> bytes:
    """Changes with everything that changes what a saved sequence means."""
    whole = blake2b(digest_size=_DIGEST_BYTES)
    exit_policy = msgspec.to_builtins(model.exit_policy)
    for part in (model.backend, model.source_text, state_format, repr(exit_policy)):
        text = part.encode("utf-8", "surrogateescape")
        whole.update(len(text).to_bytes(8, "little") + text)
    for fact in _facts(Path(model.source_path)) if model.source_path is not None else ():
        whole.update(fact)
    return whole.digest()


def _facts(source: Path) -> Iterator[bytes]:
    """Of each file of a model: name, size and time of change, and its first and last megabyte."""
    paths = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for path in paths:
        facts = path.stat()
        yield f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        with open_regular(path) as file:
            yield file.read(_PROBE_BYTES)
            file.seek(max(0, facts.st_size - _PROBE_BYTES), os.SEEK_SET)
            yield file.read(_PROBE_BYTES)
