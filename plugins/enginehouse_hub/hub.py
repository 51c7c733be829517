"""The Hugging Face hub as a model hub. Imports ``huggingface_hub`` on use: every start imports this module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from enginehouse.contract.backend import Progress
from enginehouse.contract.errors import MissingDependency
from enginehouse.contract.gguf_names import model_in
from enginehouse_hub.cache import cached_snapshot, complete_snapshot
from enginehouse_hub.reference import HubReference, parse_reference

if TYPE_CHECKING:
    from enginehouse_hub.listing import HubFile

__all__ = ["HuggingFaceHub"]

_REPORT_S = 0.25


@frozen
class HuggingFaceHub:
    """Implements :class:`enginehouse.contract.model_hub.ModelHub` for ``OWNER/NAME[:QUANTISATION][@REVISION]``."""

    name: str = "hub"
    api_version: int = 1

    def matches(self, text: str) -> bool:
        """Return True if ``text`` is a reference to a model."""
        return parse_reference(text) is not None

    def find(self, text: str) -> Path | None:
        """Return the downloaded model; without the library None, because the cache is not known then."""
        if not _is_installed():
            return None
        reference = _read(text)
        snapshot = cached_snapshot(reference.model_id, reference.revision)
        return None if snapshot is None else model_in(snapshot, reference.quantization, text)

    def is_complete(self, text: str) -> bool:
        """Return True if every weight file of the model is here."""
        return _is_installed() and complete_snapshot(_read(text)) is not None

    def advice(self, text: str) -> str:
        """Return the command that downloads the model, or the one that installs the library."""
        if _is_installed():
            said = f"it is not downloaded yet; run: enginehouse pull {text} (or start the server with --pull)"
        else:
            said = MissingDependency("huggingface_hub", "hub").message
        return f"if it is the id of a model on the hub, {said}"

    def download(self, text: str, progress: Progress) -> None:
        """Download the model.

        Raises:
            MissingDependency: the library is not installed.
            DownloadError: see :func:`enginehouse_hub.pulling.pull`.
        """
        from enginehouse_hub.client import HubClient  # noqa: PLC0415 - needs the library
        from enginehouse_hub.pulling import pull  # noqa: PLC0415

        pull(_read(text), HubClient.from_env(), _Report(progress))


class _Report:
    """Reports the progress of a download a few times per second."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = self._done = 0
        self._told_s = 0.0

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        """Record the total size."""
        self._total, self._done = num_bytes, num_bytes_here
        self.note("downloading")

    def file(self, file: HubFile) -> None:
        """Report the current file."""
        self.note(f"downloading {file.path}")

    def advance(self, num_bytes: int) -> None:
        """Report the progress, at intervals."""
        self._done += num_bytes
        if time.monotonic() > self._told_s + _REPORT_S:
            self.note(f"downloading, {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB")

    def note(self, text: str) -> None:
        """Report the current activity, or the reason for a delay."""
        self._told_s = time.monotonic()
        self._progress(self._done / max(1, self._total), text)


def _is_installed() -> bool:
    return find_spec("huggingface_hub") is not None


def _read(text: str) -> HubReference:
    reference = parse_reference(text)
    assert reference is not None, "core asks only for texts that match"
    return reference
