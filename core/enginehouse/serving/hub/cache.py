"""The download cache of the Hugging Face hub's tools, in the layout of ``huggingface_hub``.

Each model has ``models--<owner>--<name>/`` with ``blobs/<digest>`` (contents), ``snapshots/<commit>/<path>`` (links to
them) and ``refs/<revision>`` (the commit of a branch or tag). The cache is shared with other tools in both directions.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.regular_files import read_regular, read_regular_text
from enginehouse.serving.hub.quantizations import choose_gguf, parts_of

__all__ = ["ModelCache", "cached_snapshot", "hub_folder", "is_complete", "is_offline", "user_folder"]

_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_REF_BYTES = 4096
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*", re.ASCII)


def user_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which the hub's tools keep user data: downloads, and the token."""
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser()


def hub_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of downloads, from the same variables as the hub's tools."""
    if folder := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    return user_folder(env) / "hub"


def is_offline(env: Mapping[str, str] = os.environ) -> bool:
    """True if the user has disabled access to the hub."""
    said = env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def cached_snapshot(model_id: str, revision: str = "main", env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of a downloaded model; None if it, or this revision of it, is not downloaded.

    Args:
        revision: a branch, a tag, or a commit.
    """
    if not _ID.fullmatch(model_id) or not _REVISION.fullmatch(revision) or ".." in revision:
        return None
    cache = ModelCache.of(model_id, hub_folder(env))
    snapshot = cache.snapshot(cache.commit_of(revision) or revision)
    return snapshot if snapshot.is_dir() else None


def is_complete(snapshot: Path, quantization: str | None) -> bool:
    """True if every weight file of the model is present, according to its own files."""
    try:
        if quantization is not None or not (snapshot / "config.json").is_file():
            first = choose_gguf(snapshot, quantization, "")
            return first is not None and all(Path(part).is_file() for part in parts_of(first))
        index = snapshot / "model.safetensors.index.json"
        if index.is_file():
            return all((snapshot / name).is_file() for name in _weights_of(index))
        return any(snapshot.glob("*.safetensors"))
    except (ModelLoadError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return False


class _Index(msgspec.Struct):
    """The part of ``model.safetensors.index.json`` that is read."""

    weight_map: dict[str, str]


def _weights_of(index: Path) -> set[str]:
    """Return the names of the files that hold a model's weights. Raises OSError, ValueError or RecursionError."""
    return set(msgspec.json.decode(read_regular(index, _MAX_INDEX_BYTES), type=_Index).weight_map.values())


@frozen
class ModelCache:
    """The cache folder of one model."""

    folder: Path

    @classmethod
    def of(cls, model_id: str, hub: Path) -> ModelCache:
        """Return the cache of ``model_id`` below the folder of all downloads; its folder may not exist yet."""
        return cls(hub / f"models--{model_id.replace('/', '--')}")

    def commit_of(self, revision: str) -> str | None:
        """Return the commit of a branch or tag at its last download; None if it was never downloaded."""
        try:
            return read_regular_text(self.folder / "refs" / revision, _MAX_REF_BYTES).strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Return the path of a complete blob."""
        return self.folder / "blobs" / digest

    def incomplete(self, digest: str) -> Path:
        """Return the path of a blob while it is being downloaded."""
        return self.folder / "blobs" / f"{digest}.incomplete"

    def num_bytes(self, commit: str, path: str, digest: str) -> int | None:
        """Return the size of a file, as a blob or (without support for links) in the snapshot; else None."""
        for file in (self.blob(digest), self.snapshot(commit) / path):
            with contextlib.suppress(OSError):
                return file.stat().st_size
        return None

    def link(self, commit: str, path: str, digest: str) -> None:
        """Link a blob as a file of a commit; without support for links (Windows) the blob itself is moved there."""
        blob, file = self.blob(digest), self.snapshot(commit) / path
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # a broken link
        try:
            file.symlink_to(os.path.relpath(blob, file.parent))
        except (OSError, NotImplementedError):
            os.replace(blob, file)

    def record(self, revision: str, commit: str) -> None:
        """Record the current commit of a branch or tag."""
        if revision == commit:
            return
        file = self.folder / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.new")
        scratch.write_text(commit, encoding="utf-8")
        os.replace(scratch, file)
