"""Downloads at the start of a server that was told to (``server.pull``): a model's files, before it is planned.

Only the start of the server calls this. A request never causes a download.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from enginehouse.serving.background import apart
from enginehouse.serving.hub import HubClient, HubReference, pull
from enginehouse.serving.hub.cache import cached_snapshot, is_complete
from enginehouse.serving.hub.listing import HubFile
from enginehouse.serving.sources import Offered, hub_reference

__all__ = ["OnShare", "download", "missing_download"]

_REPORT_S = 0.25

OnShare = Callable[[float, str], None]
"""Called on the event loop with the share that is here (0 to 1) and what is being done."""


def missing_download(source: str, offered: Offered) -> HubReference | None:
    """The hub's model that ``source`` means, where it is not here as a whole; looks at the disk only."""
    reference = hub_reference(source, offered)
    if reference is None:
        return None
    snapshot = cached_snapshot(reference.model_id, reference.revision)
    return None if snapshot is not None and is_complete(snapshot, reference.quantization) else reference


async def download(reference: HubReference, on_share: OnShare) -> None:
    """Fetch a model; cancelling stops it, and what has arrived is kept.

    Raises:
        DownloadError: it could not be fetched.
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
    """Nobody wants the download any more."""


class _Report:
    """Passes a download's progress on, some times a second."""

    def __init__(self, on_share: OnShare) -> None:
        self.is_stopped = False
        self._on_share = on_share
        self._total = self._done = 0
        self._told_s = 0.0

    def begin(self, files: Sequence[HubFile], num_bytes: int, num_bytes_here: int) -> None:
        """Know the whole."""
        self._total, self._done = num_bytes, num_bytes_here
        self._tell("downloading")

    def file(self, file: HubFile) -> None:
        """Say which file."""
        self._tell(f"downloading {file.path}")

    def advance(self, num_bytes: int) -> None:
        """Say how far, now and then."""
        self._done += num_bytes
        if self.is_stopped:
            raise _Stopped
        if time.monotonic() > self._told_s + _REPORT_S:
            self._tell(f"downloading, {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB")

    def note(self, text: str) -> None:
        """Say why it takes longer."""
        self._tell(text)

    def _tell(self, text: str) -> None:
        if self.is_stopped:
            raise _Stopped
        self._told_s = time.monotonic()
        self._on_share(self._done / max(1, self._total), text)
