"""Cache of compiled constraints, limited by their estimated size in bytes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import OrderedDict

from enginehouse_llguidance.compiled import LlguidanceGrammar

__all__ = ["KeptGrammars"]

_Key = tuple[str, str]

_BYTES_OF_ANY = 131_072
_BYTES_PER_CHAR = 64
"""The library does not report the size of a grammar. Measured with version 1.9: 27 to 100 KB for the smallest, 26 bytes
for each byte of a long list of constants, up to 71 for nested objects; following a text adds little.
"""

_MUCH_BYTES = 1_048_576  # worth a trim of one or two milliseconds


class KeptGrammars:
    """LRU cache of grammars. Thread-safe.

    Args:
        max_count: maximum number of grammars.
        max_bytes: maximum total estimated size in bytes; a larger grammar is not cached.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._grammars: OrderedDict[_Key, LlguidanceGrammar] = OrderedDict()
        self._num_bytes = 0
        self._num_dropped_bytes = 0  # since the last trim
        self._lock = threading.Lock()

    def get(self, key: _Key) -> LlguidanceGrammar | None:
        """Return the cached grammar, or None."""
        with self._lock:
            if (known := self._grammars.get(key)) is not None:
                self._grammars.move_to_end(key)
            return known

    def put(self, key: _Key, grammar: LlguidanceGrammar) -> None:
        """Cache a grammar, evicting the least recently used ones."""
        with self._lock:
            if key not in self._grammars:
                self._num_bytes += _estimate(key)
            self._grammars[key] = grammar
            self._grammars.move_to_end(key)
            while self._num_bytes > self._max_bytes or len(self._grammars) > self._max_count:
                oldest = next(iter(self._grammars))
                del self._grammars[oldest]  # no name may hold it: it is to be freed before the trim below
                self._num_bytes -= _estimate(oldest)
                self._num_dropped_bytes += _estimate(oldest)
        self.give_back()

    def compiled_in_vain(self, key: _Key) -> None:
        """Count the memory allocated for a constraint that was refused."""
        with self._lock:
            self._num_dropped_bytes += _estimate(key)
        self.give_back()

    def give_back(self) -> None:
        """Return freed memory to the system once it is large; otherwise the allocator would retain it."""
        with self._lock:
            if self._num_dropped_bytes < _MUCH_BYTES:
                return
            self._num_dropped_bytes = 0
        _trim()


def _estimate(key: _Key) -> int:
    return _BYTES_OF_ANY + _BYTES_PER_CHAR * len(key[1])


def _trim() -> None:
    """Return free heap memory to the system. Only the GNU C library retains it, and only it has this function."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
