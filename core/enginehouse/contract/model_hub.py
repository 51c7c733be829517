"""Interface of a model hub: models that users name by ids, and that are downloaded before they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from enginehouse.contract.backend import Progress

__all__ = ["ModelHub"]


class ModelHub(Protocol):
    """A hub that a plugin registers with ``register_model_hubs``. All methods but ``matches`` may block.

    Attributes:
        name: name of the hub, for messages.
        api_version: version of this interface.

    Calls:
        matches: for each text that names a model; server, planning thread; microseconds.
        find: for each source that is planned; server, planning thread; milliseconds.
        is_complete: for each model at start with ``server.pull``; server, a thread for it; milliseconds.
        advice: when a model is not found; server, planning thread; microseconds.
        download: for each model that is missing, with ``server.pull``, or that an administrator asks to download;
            server, a thread for it; no limit while ``progress`` changes.
    """

    name: str
    api_version: int

    def matches(self, text: str) -> bool:
        """Return True if ``text`` has the form of an id of this hub; reads nothing."""

    def find(self, text: str) -> Path | None:
        """Return the file or folder of a downloaded model, or None; reads only the disk.

        Raises:
            ModelLoadError: the id means several files.
        """

    def is_complete(self, text: str) -> bool:
        """Return True if all files of the model are on the disk; reads only the disk."""

    def advice(self, text: str) -> str:
        """Return what a user can do to get a model that :meth:`find` does not find, as the end of a sentence."""

    def download(self, text: str, progress: Progress) -> None:
        """Download the model; data that has arrived is kept if this fails. Called on a thread of its own.

        Args:
            progress: call it some times per second; an exception that it raises must end the download.

        Raises:
            DownloadError: the model could not be downloaded.
        """
