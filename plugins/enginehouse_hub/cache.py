"""The download cache of the Hugging Face hub's tools: place and names are those of ``huggingface_hub``.

Each model has ``models--<owner>--<name>/`` with ``blobs/<digest>`` (contents), ``snapshots/<commit>/<path>`` (links to
them) and ``refs/<revision>`` (the commit of a branch or tag). The cache is shared with other tools in both directions.
It is read by our own functions, which open only regular files: the library's would wait for a named pipe.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import msgspec
from attrs import frozen

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import choose_gguf, parts_of
from enginehouse.contract.regular_files import read_regular, read_regular_text
from enginehouse_hub.reference import HubReference

__all__ = ["ModelCache", "cached_snapshot", "complete_snapshot", "is_complete"]

_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_REF_BYTES = 4096
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*", re.ASCII)


def cached_snapshot(model_id: str, revision: str = "main") -> Path | None:
    """Return the folder of a downloaded model; None if it, or this revision of it, is not downloaded.

    Args:
        revision: a branch, a tag, or a commit.
    """
    if not _ID.fullmatch(model_id) or not _REVISION.fullmatch(revision) or ".." in revision:
        return None
    cache = ModelCache.of(model_id)
    snapshot = cache.snapshot(cache.commit_of(revision) or revision)
    return snapshot if snapshot.is_dir() else None


def complete_snapshot(reference: HubReference) -> Path | None:
    """Return the folder of a model that is downloaded completely, else None."""
    snapshot = cached_snapshot(reference.model_id, reference.revision)
    return snapshot if snapshot is not None and is_complete(snapshot, reference.quantization) else None


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
    def of(cls, model_id: str) -> ModelCache:
        """Return the cache of ``model_id``; its folder may not exist yet."""
        from huggingface_hub import constants  # noqa: PLC0415 - the library is imported on use

        return cls(Path(constants.HF_HUB_CACHE) / constants.REPO_ID_SEPARATOR.join(("models", *model_id.split("/"))))

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
        except FileExistsError:  # another download of the model, which had the blob, too, was faster
            return
        except (OSError, NotImplementedError):
            os.replace(blob, file)

    def record(self, revision: str, commit: str) -> None:
        """Record the current commit of a branch or tag."""
        if revision == commit:
            return
        file = self.folder / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several downloads of the model may end at once.
        scratch = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.new")
        scratch.write_text(commit, encoding="utf-8")
        os.replace(scratch, file)
