"""Compiled constraints that are kept for the next request, as many as fit into a number of bytes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import OrderedDict

from enginehouse_llguidance.matcher import LlguidanceGrammar

__all__ = ["KeptGrammars"]

_Key = tuple[str, str]

_BYTES_OF_ANY = 131_072
_BYTES_PER_CHAR = 64
"""The library does not say what a grammar takes. Measured with version 1.9: 27 to 100 KB for the smallest, 26 bytes for
each byte of a long list of constants, up to 71 for nested objects; following a text adds little."""

_MUCH_BYTES = 4_194_304  # worth a millisecond or two


class KeptGrammars:
    """The grammars that were used last. Any thread.

    Args:
        max_count: most grammars.
        max_bytes: most bytes of them together, as estimated; a larger one is not kept.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._grammars: OrderedDict[_Key, LlguidanceGrammar] = OrderedDict()
        self._num_bytes = 0
        self._num_dropped_bytes = 0  # since memory was last given back
        self._lock = threading.Lock()

    def get(self, key: _Key) -> LlguidanceGrammar | None:
        """What was compiled before."""
        with self._lock:
            if (known := self._grammars.get(key)) is not None:
                self._grammars.move_to_end(key)
            return known

    def put(self, key: _Key, grammar: LlguidanceGrammar) -> None:
        """Keep a grammar, in the place of those that were not used for longest."""
        with self._lock:
            if key not in self._grammars:
                self._num_bytes += _estimate(key)
            self._grammars[key] = grammar
            self._grammars.move_to_end(key)
            while self._num_bytes > self._max_bytes or len(self._grammars) > self._max_count:
                oldest, _ = self._grammars.popitem(last=False)
                self._num_bytes -= _estimate(oldest)
                self._num_dropped_bytes += _estimate(oldest)
        self.give_back()

    def compiled_in_vain(self, key: _Key) -> None:
        """Count what was allocated for a constraint that was refused."""
        with self._lock:
            self._num_dropped_bytes += _estimate(key)
        self.give_back()

    def give_back(self) -> None:
        """Return what was dropped to the system, once it is much: the allocator would keep it for the next bomb."""
        with self._lock:
            if self._num_dropped_bytes < _MUCH_BYTES:
                return
            self._num_dropped_bytes = 0
        _trim()


def _estimate(key: _Key) -> int:
    return _BYTES_OF_ANY + _BYTES_PER_CHAR * len(key[1])


def _trim() -> None:
    """Only the GNU C library keeps freed memory for long, and only it has this function."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
