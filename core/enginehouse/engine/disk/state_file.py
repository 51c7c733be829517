"""One saved sequence as a file: whose it is, its token ids, the runner's data, and a checksum over all of that.

The layout, little-endian: magic, digest of the model, digest of the namespace, number of tokens, number of bytes of the
state; the token ids, the state, the checksum. Knows nothing of other files, of runners and of what is worth keeping.
"""

from __future__ import annotations

import contextlib
import os
import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.regular_files import open_regular

__all__ = ["DIGEST_BYTES", "DamagedFile", "StateHead", "digest", "read_head", "read_state", "write_state"]

DIGEST_BYTES = 16
_MAGIC = b"EHstate1"
_HEAD = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sIQ")
_TOKEN_BYTES = 4
_MAX_TOKENS = 2**22  # no context is longer; a file may be larger than it has bytes on the disk


class DamagedFile(Exception):
    """A file is not what was written, or was written for something else; the text says which."""


@frozen(eq=False)
class StateHead:
    """What a file says of itself before the state.

    Attributes:
        model: digest of the model and of everything that its states depend on.
        namespace: digest of the namespace; its text may hold what a client keeps secret.
        token_ids: (num_tokens,) int32.
        num_state_bytes: size of the runner's data.
    """

    model: bytes
    namespace: bytes
    token_ids: NDArray[np.int32]
    num_state_bytes: int

    @property
    def num_file_bytes(self) -> int:
        """Size of the whole file."""
        return _HEAD.size + _TOKEN_BYTES * len(self.token_ids) + self.num_state_bytes + DIGEST_BYTES

    def to_bytes(self) -> bytes:
        """As it stands in the file."""
        fixed = _HEAD.pack(_MAGIC, self.model, self.namespace, len(self.token_ids), self.num_state_bytes)
        return fixed + self.token_ids.astype("<i4").tobytes()


def digest(*parts: bytes) -> bytes:
    """A digest that no other parts have."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def write_state(path: Path, head: StateHead, state: memoryview) -> None:
    """Write a file that is there as a whole or not at all, readable for its owner only.

    It is not forced to the disk: after a power cut a part may be missing, which the checksum shows.

    Raises:
        OSError: the disk is full, or the folder is gone; nothing is left behind.
    """
    first = head.to_bytes()
    checksum = blake2b(first, digest_size=DIGEST_BYTES)
    checksum.update(state)
    temporary = path.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)  # whatever it is: a pipe would keep us waiting
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
    """What a file says of itself, without reading the state.

    Raises:
        DamagedFile: it is cut short, too long, no such file at all, or of another model.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        fixed = file.read(_HEAD.size)
        if len(fixed) < _HEAD.size or not fixed.startswith(_MAGIC):
            raise DamagedFile("it is no saved sequence of this version")
        _, its_model, namespace, num_tokens, num_state_bytes = _HEAD.unpack(fixed)
        if its_model != model:
            raise DamagedFile("it was saved by another model, with other settings or by another version")
        num_bytes = os.fstat(file.fileno()).st_size
        wanted = _HEAD.size + _TOKEN_BYTES * num_tokens + num_state_bytes + DIGEST_BYTES
        if num_bytes != wanted:
            raise DamagedFile(f"it has {num_bytes} bytes instead of {wanted}")
        if num_tokens > _MAX_TOKENS:
            raise DamagedFile(f"it claims to hold {num_tokens} tokens")
        token_ids = np.frombuffer(file.read(_TOKEN_BYTES * num_tokens), "<i4").astype(np.int32)
    return StateHead(its_model, namespace, token_ids, num_state_bytes)


def read_state(path: Path, head: StateHead) -> memoryview:
    """The runner's data, checked; writable memory.

    Raises:
        DamagedFile: something in the file has changed since it was written.
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
