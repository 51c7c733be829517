"""Memory shared by a worker process and the server, in which the worker notes the calls into plugins that it is in.

A process that a plugin ends (``os._exit``, a crash of a library) or that hangs cannot say where it is. Its server reads
that here. Each thread of the worker has a place of its own, which names the innermost call; noting one is one copy of
some bytes.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading

import msgspec

_PLACE_BYTES = 512
_NUM_PLACES = 8  # a worker calls plugins on its engine thread, its intake threads, and the thread of bitmasks


class NotedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call into a plugin; ``request_id`` is empty if it is made for several requests.

    Attributes:
        is_own: the plugin belongs to the distribution of Enginehouse.
    """

    plugin: str
    kind: str
    name: str
    place: str
    request_id: str = ""
    is_own: bool = True

    def __str__(self) -> str:
        """Describe the call, as in "in propose of the drafter 'x' of the plugin 'y'"."""
        return f"in {self.place} of the {self.kind} {self.name!r} of the plugin {self.plugin!r}"

    def pack(self) -> bytes:
        """Return the call as the content of a place."""
        data = msgspec.msgpack.encode(self)
        return data.ljust(_PLACE_BYTES, b"\0") if len(data) <= _PLACE_BYTES else b"\0" * _PLACE_BYTES


class CallNotes:
    """One worker's notes.

    Args:
        descriptor: of the file that both processes map; None creates one.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor = _open_shared() if descriptor is None else descriptor
        self._memory = mmap.mmap(descriptor, _PLACE_BYTES * _NUM_PLACES)
        self._is_closed = False
        self._places = threading.local()
        self._num_used = 0
        self._lock = threading.Lock()

    def enter(self, packed: bytes) -> None:
        """Note a call of this thread, given by :meth:`NotedCall.pack`."""
        places = self._places
        try:
            start = places.start
        except AttributeError:
            start = places.start = self._take_place()
            places.calls = []
        places.calls.append(packed)
        self._memory[start : start + _PLACE_BYTES] = packed

    def leave(self) -> None:
        """Note that the last call has returned, and that the thread is in the one before it again."""
        start, calls = self._places.start, self._places.calls
        calls.pop()
        if calls:
            self._memory[start : start + _PLACE_BYTES] = calls[-1]
        else:
            self._memory[start] = 0

    def _take_place(self) -> int:
        """Return the offset of a place; threads beyond the number of places share the last one."""
        with self._lock:
            place = min(self._num_used, _NUM_PLACES - 1)
            self._num_used += 1
        return place * _PLACE_BYTES

    def read(self) -> list[NotedCall]:
        """Return the calls that have not returned."""
        found: list[NotedCall] = []
        if self._is_closed:
            return found
        for start in range(0, _PLACE_BYTES * _NUM_PLACES, _PLACE_BYTES):
            packed = self._memory[start : start + _PLACE_BYTES]
            if packed[0]:
                try:
                    found.append(msgspec.msgpack.decode(packed.rstrip(b"\0"), type=NotedCall))
                except msgspec.DecodeError:  # the process has ended while it wrote
                    continue
        return found

    def close(self) -> None:
        """Release the memory; nothing can be read afterwards. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()
            os.close(self.descriptor)


def _open_shared() -> int:
    """Create a file of the right size without a name; in memory where the system can."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("enginehouse-notes")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, _PLACE_BYTES * _NUM_PLACES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
