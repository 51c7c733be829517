"""Downloads one file of a repository into the cache; resumes interrupted downloads and verifies the result.

Data is written to ``blobs/<digest>.incomplete``, which is renamed once its size and digest are correct, so that every
named file in the cache is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from attrs import frozen
from httpx2 import TransportError

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.cache import ModelCache
from enginehouse_hub.client import HubClient
from enginehouse_hub.listing import HubFile
from enginehouse_hub.reference import HubReference
from enginehouse_hub.refusals import HubUnreachable

__all__ = ["PAUSES_S", "Transfer"]

_CHUNK_BYTES = 1024 * 1024
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts without new data."""
_MAX_PAUSE_S = 60.0
_LOCK_POLL_S = 0.5


@frozen
class Transfer:
    """Downloads files of one model.

    Attributes:
        commit: the commit of the files.
        on_bytes: called with the number of bytes that have arrived; negative if some must be downloaded again.
        on_note: called with messages for the user.
        pauses_s: seconds between attempts without new data; their number limits such attempts.
    """

    client: HubClient
    reference: HubReference
    commit: str
    cache: ModelCache
    on_bytes: Callable[[int], None]
    on_note: Callable[[str], None]
    pauses_s: Sequence[float] = PAUSES_S

    def fetch(self, file: HubFile) -> None:
        """Download the content of ``file`` unless it is present.

        Raises:
            HubUnreachable: the hub could not be reached for a while.
            DownloadError: the hub refuses it, or sends data that does not match its description.
        """
        blob, incomplete = self.cache.blob(file.digest), self.cache.incomplete(file.digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that fetches {file.path}"
        with _locked(incomplete, lambda: self.on_note(waiting)) as stream:
            if blob.is_file():  # another process has completed it
                self.on_bytes(file.num_bytes - os.fstat(stream.fileno()).st_size)
                incomplete.unlink(missing_ok=True)
                return
            was_begun = os.fstat(stream.fileno()).st_size > 0
            self._fill(stream, file)
            is_right = _is_right(stream, file)
            if not is_right and was_begun:
                self.on_note(f"{file.path} is damaged; fetching it again from its beginning")
                self._empty(stream)
                self._fill(stream, file)
                is_right = _is_right(stream, file)
            if not is_right:
                self._empty(stream)
                raise DownloadError(f"what arrived as {file.path} is damaged: its {file.digest_of} digest is wrong")
            if os.name == "nt":  # open files cannot be renamed there
                stream.close()
            os.replace(incomplete, blob)

    def _fill(self, stream: IO[bytes], file: HubFile) -> None:
        """Append until the file has its size; the number of attempts without new data is limited."""
        num_failures = 0
        while (size := stream.seek(0, os.SEEK_END)) < file.num_bytes:
            try:
                self._append(stream, file, size)
                failure = HubUnreachable(f"the connection was closed within {file.path}")
            except HubUnreachable as error:
                failure = error
            stream.flush()
            now = stream.seek(0, os.SEEK_END)
            if now >= file.num_bytes:
                break
            num_failures = 0 if now > size else num_failures + 1
            if num_failures > len(self.pauses_s):
                raise failure
            pause_s = self.pauses_s[max(0, num_failures - 1)] if self.pauses_s else 0.0
            self.on_note(f"{failure.message}; going on in {max(pause_s, failure.retry_after_s):.0f} s")
            time.sleep(min(_MAX_PAUSE_S, max(pause_s, failure.retry_after_s)))
        if size > file.num_bytes:
            self._empty(stream)
            self._fill(stream, file)

    def _append(self, stream: IO[bytes], file: HubFile, size: int) -> None:
        """Append the data of one connection after the first ``size`` bytes."""
        with self.client.open_file(self.reference, self.commit, file.path, size) as content:
            if content.start != size:  # the server does not support ranges
                self._empty(stream)
            left = file.num_bytes - content.start
            try:
                for chunk in content.chunks():
                    stream.write(chunk[:left])
                    self.on_bytes(min(len(chunk), left))
                    left -= len(chunk)
                    if left <= 0:
                        return
            except TransportError as error:
                raise HubUnreachable(f"the connection was closed within {file.path}: {error}") from error

    def _empty(self, stream: IO[bytes]) -> None:
        self.on_bytes(-stream.seek(0, os.SEEK_END))
        stream.truncate(0)


def _is_right(stream: IO[bytes], file: HubFile) -> bool:
    digest = hashlib.sha256() if file.digest_of == "sha256" else hashlib.sha1(usedforsecurity=False)
    if file.digest_of == "git":
        digest.update(b"blob %d\0" % file.num_bytes)
    stream.seek(0)
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest() == file.digest


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[IO[bytes]]:
    """Open or create the file at ``path`` and lock it for this process; Windows excludes other writers anyway."""
    is_told = False
    while True:
        if path.exists() and not path.is_file():
            raise DownloadError(f"{path} is not a regular file; remove it")
        with path.open("a+b", buffering=0) as stream:
            if _try_lock(stream) and _is_at(stream, path):
                yield stream
                return
        if not is_told:
            on_wait()
            is_told = True
        time.sleep(_LOCK_POLL_S)


def _try_lock(stream: IO[bytes]) -> bool:
    try:
        import fcntl  # noqa: PLC0415 - not on Windows
    except ImportError:
        return True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_at(stream: IO[bytes], path: Path) -> bool:
    """True if the locked file still has its name; the previous holder of the lock may have completed it."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except OSError:
        return False
