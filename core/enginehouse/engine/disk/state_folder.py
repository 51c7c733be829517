"""Saved sequences on disk: one checksummed file each, in a folder with a size limit.

A damaged, foreign or incomplete file is not loaded; files are written completely, then renamed. Does not know runners:
a state is bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.regular_files import open_regular
from enginehouse.engine.prefix_cache import common_prefix_length
from enginehouse.settings.limits import format_bytes

DIGEST_BYTES = 16
_MAGIC = b"EHstate2"
_HEAD = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sIIQ")
_TOKEN_BYTES = 4
_MAX_TOKENS = 2**22  # longer than any context; sparse files can claim any size


class DamagedFile(Exception):
    """A file is damaged, or was written for another model; the message gives the reason."""


@frozen(eq=False)
class StateHead:
    """Header of a file, before the state.

    Attributes:
        model: digest of the model and of everything that its states depend on.
        namespace: digest of the namespace, whose text may contain secrets of a client.
        token_ids: (num_tokens,) int32.
        num_state_bytes: size of the runner's data.
        cuts: (num_cuts,) int32, ascending: lengths to which it can be truncated, if not to all.
    """

    model: bytes
    namespace: bytes
    token_ids: NDArray[np.int32]
    num_state_bytes: int
    cuts: NDArray[np.int32] = field(factory=lambda: np.empty(0, np.int32))

    def cut(self, length: int) -> int:
        """Return the greatest length at or before ``length`` to which the sequence can be truncated; 0 if none."""
        index = int(np.searchsorted(self.cuts, length, side="right"))
        return int(self.cuts[index - 1]) if index else 0

    @property
    def num_file_bytes(self) -> int:
        """Size of the whole file."""
        num_numbers = len(self.token_ids) + len(self.cuts)
        return _HEAD.size + _TOKEN_BYTES * num_numbers + self.num_state_bytes + DIGEST_BYTES

    def to_bytes(self) -> bytes:
        """Return the serialised header."""
        sizes = len(self.token_ids), len(self.cuts), self.num_state_bytes
        numbers = np.concatenate([self.token_ids, self.cuts]).astype("<i4")
        return _HEAD.pack(_MAGIC, self.model, self.namespace, *sizes) + numbers.tobytes()


def digest(*parts: bytes) -> bytes:
    """Return a digest of ``parts``; each part is prefixed by its length, so different parts do not collide."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def write_state(path: Path, head: StateHead, state: memoryview) -> None:
    """Write a file atomically, readable only by its owner.

    It is not synced to the disk: after a power cut a part may be missing, which the checksum detects.

    Raises:
        OSError: the disk is full, or the folder is missing; no partial file remains.
    """
    first = head.to_bytes()
    checksum = blake2b(first, digest_size=DIGEST_BYTES)
    checksum.update(state)
    temporary = path.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)  # of any type: opening a pipe would block
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for part in (first, state, checksum.digest()):
                file.write(part)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_head(path: Path, model: bytes) -> StateHead:
    """Read the header of a file without the state.

    Raises:
        DamagedFile: it is too short, too long, not a state file, or of another model.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        fixed = file.read(_HEAD.size)
        if len(fixed) < _HEAD.size or not fixed.startswith(_MAGIC):
            raise DamagedFile("it is not a saved sequence of this version")
        _, its_model, namespace, num_tokens, num_cuts, num_state_bytes = _HEAD.unpack(fixed)
        if its_model != model:
            raise DamagedFile("it was saved by another model, with other settings or by another version")
        num_bytes = os.fstat(file.fileno()).st_size
        wanted = _HEAD.size + _TOKEN_BYTES * (num_tokens + num_cuts) + num_state_bytes + DIGEST_BYTES
        if num_bytes != wanted:
            raise DamagedFile(f"it has {num_bytes} bytes instead of {wanted}")
        if num_tokens > _MAX_TOKENS or num_cuts > num_tokens:
            raise DamagedFile(f"it claims to hold {num_tokens} tokens and {num_cuts} checkpoints")
        numbers = np.frombuffer(file.read(_TOKEN_BYTES * (num_tokens + num_cuts)), "<i4").astype(np.int32)
    return StateHead(its_model, namespace, numbers[:num_tokens], num_state_bytes, numbers[num_tokens:])


def read_state(path: Path, head: StateHead) -> memoryview:
    """Read and verify the runner's data; returns writable memory.

    Raises:
        DamagedFile: the file has changed since it was written.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != head.num_file_bytes:
            raise DamagedFile("its size has changed")
        data = bytearray(head.num_file_bytes)
        view = memoryview(data)
        num_read = file.readinto(view)
    checksum = blake2b(view[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest()
    first = head.to_bytes()
    if num_read < len(data) or data[: len(first)] != first or checksum != data[-DIGEST_BYTES:]:
        raise DamagedFile("its checksum is wrong")
    return view[len(first) : -DIGEST_BYTES]


MIN_SAVED_TOKENS = 64
"""Minimum length of saved sequences: recomputing fewer tokens takes about as long as opening a file."""

_SUFFIX = ".state"
_log = logging.getLogger(__name__)


class FolderTaken(Exception):
    """Another process uses this folder."""


@define(eq=False)
class SavedState:
    """One file.

    Attributes:
        last_used: seconds since the epoch, the modification time of the file.
    """

    path: Path
    head: StateHead
    last_used: float = field(kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.head.token_ids)


class StateFolder:
    """Folder of saved states of one model; created if missing.

    Args:
        path: the folder.
        model: digest of the model and of everything that its states depend on.
        max_bytes: maximum size of all files together.
        can_cut: True if a state can be truncated to any length.

    Raises:
        FolderTaken: another process uses the folder.
        OSError: the folder cannot be created or read.
    """

    def __init__(self, path: Path, model: bytes, max_bytes: int, *, can_cut: bool) -> None:
        self.path = path
        self._model, self._max_bytes, self._can_cut = model, max_bytes, can_cut
        self._mutex = threading.Lock()
        self._states: dict[tuple[bytes, bytes], list[SavedState]] = {}
        self._num_bytes = 0
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        self._lock_descriptor = _lock(path / "lock")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._read_all()
            undo.pop_all()

    def __len__(self) -> int:
        """Number of files."""
        return sum(map(len, self._states.values()))

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self._num_bytes

    def find(self, token_ids: NDArray[np.int32], namespace: str) -> tuple[SavedState, int] | None:
        """Return the state with the longest prefix of ``token_ids`` (smallest of equals) and the prefix length."""
        with self._mutex:
            best: tuple[SavedState, int] | None = None
            for state in self._states.get(_place(token_ids, _digest_of(namespace)), ()):
                length = common_prefix_length(state.head.token_ids, token_ids)
                if length < state.num_tokens and not self._can_cut:
                    length = state.head.cut(length)
                if not length:
                    continue
                if best is None or (length, -state.num_tokens) > (best[1], -best[0].num_tokens):
                    best = state, length
            return best

    def holds(self, token_ids: NDArray[np.int32], namespace: str) -> bool:
        """Return True if an existing file makes a file of exactly these tokens redundant."""
        found = self.find(token_ids, namespace)
        return found is not None and found[1] == len(token_ids)

    def write(self, token_ids: NDArray[np.int32], namespace: str, data: memoryview, cuts: Sequence[int] = ()) -> bool:
        """Add a file, and remove files that it replaces or that no longer fit; blocks on disk I/O.

        Args:
            token_ids, namespace, data: the sequence.
            cuts: see :class:`StateHead`.

        Returns:
            False if the file was not written; the reason is logged.
        """
        head = StateHead(self._model, _digest_of(namespace), token_ids, data.nbytes, np.array(cuts, np.int32))
        path = self.path / (digest(head.namespace, token_ids.tobytes()).hex() + _SUFFIX)
        if head.num_file_bytes > self._max_bytes:
            _log.info("a sequence of %s is larger than the whole disk tier", format_bytes(head.num_file_bytes))
            return False
        self._free(head.num_file_bytes)
        try:
            write_state(path, head, data)
            state = SavedState(path, head, last_used=path.stat().st_mtime)
        except OSError as error:
            _log.warning("a sequence could not be saved in %s: %s", self.path, error.strerror)
            return False
        with self._mutex:
            replaced = [other for other in self._near(head) if self._is_replaced(other, head)]
            self._add(state)
        for other in replaced:
            self.remove(other, keep_file=other.path == path)
        return True

    def read(self, state: SavedState) -> memoryview | None:
        """Read and verify the runner's data; None if that fails, and the file is removed. Blocks on disk I/O."""
        try:
            data = read_state(state.path, state.head)
            os.utime(state.path)
        except (DamagedFile, OSError) as error:
            self.discard(state, str(error))
            return None
        state.last_used = state.path.stat().st_mtime if state.path.exists() else state.last_used
        return data

    def discard(self, state: SavedState, reason: str) -> None:
        """Remove an unusable file and log the reason; blocks on disk I/O."""
        _log.warning("the saved sequence %s is ignored and removed: %s", state.path, reason)
        self.remove(state)

    def remove(self, state: SavedState, *, keep_file: bool = False) -> None:
        """Remove a file from the index and delete it; blocks on disk I/O."""
        with self._mutex:
            near = self._near(state.head)
            if state not in near:
                return
            near.remove(state)
            self._num_bytes -= state.head.num_file_bytes
        if not keep_file:
            with contextlib.suppress(OSError):
                state.path.unlink()

    def close(self) -> None:
        """Release the lock of the folder; the files remain."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def _read_all(self) -> None:
        """Index the existing files by their headers; remove unusable ones."""
        for path in sorted(self.path.iterdir()):
            if path.suffix == ".tmp":
                with contextlib.suppress(OSError):
                    path.unlink()  # its writer died
            if path.suffix != _SUFFIX:
                continue
            try:
                self._add(SavedState(path, read_head(path, self._model), last_used=path.stat().st_mtime))
            except (DamagedFile, OSError) as error:
                _log.warning("the saved sequence %s is ignored and removed: %s", path, error)
                with contextlib.suppress(OSError):
                    path.unlink()
        self._free(0)

    def _free(self, num_bytes: int) -> None:
        """Remove the least recently used files until ``num_bytes`` more bytes fit."""
        with self._mutex:
            oldest = sorted(self._all(), key=lambda state: state.last_used)
        for state in oldest:
            if self._num_bytes + num_bytes <= self._max_bytes:
                return
            self.remove(state)

    def _all(self) -> Iterator[SavedState]:
        for states in self._states.values():
            yield from states

    def _near(self, head: StateHead) -> list[SavedState]:
        """Return the index entry of states with the same first tokens; the list itself, not a copy."""
        return self._states.setdefault(_place(head.token_ids, head.namespace), [])

    def _add(self, state: SavedState) -> None:
        self._near(state.head).append(state)
        self._num_bytes += state.head.num_file_bytes

    def _is_replaced(self, old: SavedState, new: StateHead) -> bool:
        """Return True if the old file is redundant once the new one exists."""
        shared = common_prefix_length(old.head.token_ids, new.token_ids)
        return shared == old.num_tokens and (self._can_cut or shared in (len(new.token_ids), new.cut(shared)))


def _place(token_ids: NDArray[np.int32], namespace: bytes) -> tuple[bytes, bytes]:
    """Return the index key, which is equal for states that share the shortest prefix worth saving."""
    return namespace, token_ids[:MIN_SAVED_TOKENS].astype("<i4").tobytes()


def _digest_of(namespace: str) -> bytes:
    return digest(namespace.encode("utf-8", "surrogatepass"))


def _lock(path: Path) -> int:
    """Lock the file for the lifetime of this process; raises FolderTaken if another process holds the lock."""
    try:
        import fcntl  # noqa: PLC0415 - not on Windows, which has no worker processes either
    except ImportError:
        return -1
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise FolderTaken(str(path.parent)) from error
    return descriptor
