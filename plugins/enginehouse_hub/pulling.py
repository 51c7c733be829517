"""Downloads the files that a model needs: listing, choice of files, disk check, transfer, and linking.

A model's folder receives its files after all of them have arrived, so it never holds an incomplete model. Called by
``enginehouse pull``, and by a server that was started with ``--pull`` or is asked to download by an administrator.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen
from huggingface_hub import is_offline_mode

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.cache import ModelCache, complete_snapshot
from enginehouse_hub.client import HubClient
from enginehouse_hub.listing import HubFile, needed_files
from enginehouse_hub.reference import HubReference
from enginehouse_hub.refusals import HubUnreachable
from enginehouse_hub.transfer import PAUSES_S, Transfer

__all__ = ["PullReport", "Pulled", "pull"]

_SPARE_BYTES = 64 * 1024 * 1024


class PullReport(Protocol):
    """Receives the progress of a download. All methods are called on the thread that calls :func:`pull`."""

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        """Start: ``files`` have ``num_bytes`` in total, of which ``num_bytes_here`` are present."""

    def file(self, file: HubFile) -> None:
        """A file is being downloaded now."""

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more bytes have arrived; negative if some turned out to be unusable."""

    def note(self, text: str) -> None:
        """Message about a step that takes time, or the reason for a delay."""


@frozen(kw_only=True)
class Pulled:
    """A model that is downloaded.

    Attributes:
        folder: folder with its files.
        commit: commit of the repository; using it as the revision pins the model.
        num_bytes_fetched: number of downloaded bytes; 0 if everything was present.
        files: the needed files; empty if the hub was not asked.
        note: reason why the hub was not asked; empty if it was.
    """

    folder: Path
    commit: str
    num_bytes_fetched: int = 0
    files: tuple[HubFile, ...] = ()
    note: str = ""


def pull(
    reference: HubReference,
    client: HubClient,
    report: PullReport,
    *,
    code: bool = False,
    dry_run: bool = False,
    pauses_s: Sequence[float] = PAUSES_S,
) -> Pulled:
    """Download a model, but only the data that is missing.

    Args:
        code: also download the repository's Python files.
        dry_run: download nothing; ``files`` of the result lists the needed files.
        pauses_s: seconds between attempts without new data; their number limits such attempts.

    Raises:
        DownloadError: the model does not exist, may not be read, does not fit the disk, or did not arrive completely.
    """
    here = None if code or dry_run else complete_snapshot(reference)
    if here is not None and _is_commit(reference.revision):
        return Pulled(folder=here, commit=here.name, note="this commit is here, and commits do not change")
    if is_offline_mode():
        if here is None:
            raise DownloadError(f"{reference} is not here, and HF_HUB_OFFLINE forbids asking the hub")
        return Pulled(folder=here, commit=here.name, note="HF_HUB_OFFLINE forbids asking the hub for changes")
    try:
        listing = client.list_files(reference)
    except HubUnreachable as error:
        if here is None:
            raise
        return Pulled(folder=here, commit=here.name, note=f"{error.message}; what is here may be older than the hub's")
    files = tuple(needed_files(reference, listing, code=code))
    cache = ModelCache.of(reference.model_id)
    folder = cache.snapshot(listing.commit)
    if dry_run:
        return Pulled(folder=folder, commit=listing.commit, files=files)
    transfer = Transfer(client, reference, listing.commit, cache, report.advance, report.note, pauses_s)
    num_bytes = _fetch(transfer, files, report)
    return Pulled(folder=folder, commit=listing.commit, num_bytes_fetched=num_bytes, files=files)


def _fetch(transfer: Transfer, files: Sequence[HubFile], report: PullReport) -> int:
    """Download missing files and link all; returns the number of bytes that had to be downloaded."""
    cache, commit = transfer.cache, transfer.commit
    missing = [file for file in files if cache.num_bytes(commit, file.path, file.digest) != file.num_bytes]
    total = sum(file.num_bytes for file in files)
    num_bytes_here = sum(_num_bytes_here(cache, file) for file in missing)
    to_fetch = sum(file.num_bytes for file in missing) - num_bytes_here
    try:
        _check_disk(cache.folder, to_fetch)
        report.begin(files, total, total - to_fetch)
        for file in missing:
            report.file(file)
            transfer.fetch(file)
        for file in files:
            cache.link(commit, file.path, file.digest)
        cache.record(transfer.reference.revision, commit)
    except OSError as error:
        raise DownloadError(f"cannot write to {cache.folder}: {error.strerror or error}") from error
    return to_fetch


def _num_bytes_here(cache: ModelCache, file: HubFile) -> int:
    try:
        return min(cache.incomplete(file.digest).stat().st_size, file.num_bytes)
    except OSError:
        return 0


def _check_disk(folder: Path, num_bytes: int) -> None:
    """Raise DownloadError if the disk has too little space, before the download begins."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes and num_bytes + _SPARE_BYTES > free:
        raise DownloadError(
            f"{_gigabytes(num_bytes)} must be fetched, but only {_gigabytes(free)} are free in {existing}; "
            "free some, or set HF_HOME to a folder on another disk"
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _is_commit(revision: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None
