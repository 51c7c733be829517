"""Sources of models: files, folders, hub references; and the download of missing ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse.plugins import plugin_border
from enginehouse.serving.background import apart
from enginehouse.serving.hub import HubClient, pull
from enginehouse.serving.hub.cache import cached_snapshot, is_complete
from enginehouse.serving.hub.listing import HubFile
from enginehouse.serving.hub.quantizations import choose_gguf
from enginehouse.serving.hub.reference import HubReference, parse_reference

__all__ = ["Offered", "OnShare", "download", "find_source", "hub_reference", "missing_download", "no_such_model"]

Offered = Mapping[str, Callable[[], ModelSource | None]]


def find_source(text: str, offered: Offered) -> ModelSource:
    """Find the model that ``text`` names; ``path`` is None if no local model has that name.

    A name that a plugin offers takes precedence over a file with the same name: ``./starter`` means the file. A text
    that is neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, the id of a downloaded hub model, or a text that only a
            backend understands. After a folder or an id, ``:Q4_K_M`` selects the GGUF file of that quantisation; after
            an id, ``@v1.0`` (or ``:v1.0``) selects a revision.
        offered: the model sources of all plugins, by name.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed; or a folder holds several models and
            the text does not select one.
    """
    if text in offered:
        with plugin_border(f"the model source {text!r}"):
            source = offered[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    if not path.exists():
        return ModelSource(text=text, path=_find_named(text))
    return ModelSource(text=text, path=_inside(path.absolute(), None, text))


def hub_reference(text: str, offered: Offered) -> HubReference | None:
    """Return the hub model that ``text`` names, downloaded or not; None if it means something else."""
    reference = None if text in offered else parse_reference(text)
    return None if reference is None or _is_path(text) else reference


def no_such_model(text: str, offered: Offered) -> ModelLoadError:
    """Return the error for a text that names no file and that no backend understands."""
    if hub_reference(text, offered) is not None:
        return ModelLoadError(
            f"there is no file or folder {text!r}; if it is the id of a model on the hub, it is not downloaded yet; "
            f"run: enginehouse pull {text} (or start the server with --pull)"
        )
    names = ", ".join(sorted(offered)) or "none are installed"
    return ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")


def _find_named(text: str) -> Path | None:
    """Return the path of a hub id, or of a folder with a quantisation after a colon."""
    name, colon, wanted = text.rpartition(":")
    if colon and (folder := Path(name).expanduser()).is_dir():
        return _inside(folder.absolute(), wanted, text)
    reference = parse_reference(text)
    if reference is None:
        return None
    snapshot = cached_snapshot(reference.model_id, reference.revision)
    return None if snapshot is None else _inside(snapshot, reference.quantization, text)


def _inside(path: Path, wanted: str | None, text: str) -> Path:
    """Return the model at ``path``: the path itself, or the GGUF file in a folder of such files."""
    if not path.is_dir() or (wanted is None and (path / "config.json").is_file()):
        return path
    file = choose_gguf(path, wanted, text)
    if file is None and wanted is not None:
        raise ModelLoadError(f"{text!r}: there are no GGUF files of which to pick {wanted!r}")
    return file or path


def _is_path(text: str) -> bool:
    """True if ``text``, which looks like a hub id, is more likely a path that does not exist."""
    return Path(text.partition(":")[0]).expanduser().parent.exists()


_REPORT_S = 0.25

OnShare = Callable[[float, str], None]
"""Called on the event loop with the completed share (0 to 1) and the current activity."""


def missing_download(source: str, offered: Offered) -> HubReference | None:
    """Return the hub model of ``source`` if it is not completely downloaded; reads only the disk."""
    reference = hub_reference(source, offered)
    if reference is None:
        return None
    snapshot = cached_snapshot(reference.model_id, reference.revision)
    return None if snapshot is not None and is_complete(snapshot, reference.quantization) else reference


async def download(reference: HubReference, on_share: OnShare) -> None:
    """Download a model; cancelling stops the download, and data that has arrived is kept.

    Raises:
        DownloadError: it could not be downloaded.
    """
    loop = asyncio.get_running_loop()

    def tell(share: float, text: str) -> None:
        loop.call_soon_threadsafe(on_share, share, text)

    report = _Report(tell)

    try:
        await apart(f"download {reference}", lambda: pull(reference, HubClient.from_env(), report))
    finally:
        report.is_stopped = True


class _Stopped(Exception):
    """Raised in the download thread when the download is no longer needed."""


class _Report:
    """Reports the progress of a download a few times per second."""

    def __init__(self, on_share: OnShare) -> None:
        self.is_stopped = False
        self._on_share = on_share
        self._total = self._done = 0
        self._told_s = 0.0

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        """Record the total size."""
        self._total, self._done = num_bytes, num_bytes_here
        self._tell("downloading")

    def file(self, file: HubFile) -> None:
        """Report the current file."""
        self._tell(f"downloading {file.path}")

    def advance(self, num_bytes: int) -> None:
        """Report the progress, at intervals."""
        self._done += num_bytes
        if self.is_stopped:
            raise _Stopped
        if time.monotonic() > self._told_s + _REPORT_S:
            self._tell(f"downloading, {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB")

    def note(self, text: str) -> None:
        """Report the reason for a delay."""
        self._tell(text)

    def _tell(self, text: str) -> None:
        if self.is_stopped:
            raise _Stopped
        self._told_s = time.monotonic()
        self._on_share(self._done / max(1, self._total), text)
