"""Host-side bookkeeping of the pool: the place of each position of each sequence, with reference counts.

A place holds keys and values of one token in every layer. Sequences with a common prefix share its places, so a fork
copies nothing; appended tokens always get a place of their own. Called by the runner. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import RunnerCapabilities, Span
from enginehouse.contract.errors import CacheFull
from enginehouse_backendkit.slot_table import SequenceTable, checked_length

__all__ = ["PositionPool"]


class PositionPool(SequenceTable):
    """A handle is a row of ``table``, ``0 <= handle < max_sequences``.

    Invariant: ``free_tokens() + number of places that some sequence holds == capabilities.cache_tokens``.

    Attributes:
        table: (max_sequences, max_context) int32, the place of every position.
    """

    takes_sampled = True

    def __init__(self, capabilities: RunnerCapabilities, vocab_size: int) -> None:
        super().__init__(capabilities, vocab_size)
        self.table: NDArray[np.int32] = np.zeros((capabilities.max_sequences, capabilities.max_context), np.int32)
        self._closed = list(range(capabilities.max_sequences - 1, -1, -1))
        self._owners = np.zeros(capabilities.cache_tokens, np.int32)
        # A stack with its top at the end, lowest places first: tokens appended together are adjacent in memory.
        self._free: NDArray[np.int32] = np.arange(capabilities.cache_tokens - 1, -1, -1, dtype=np.int32)
        self._num_free = capabilities.cache_tokens

    def open(self) -> int:
        """Open a new, empty sequence. Raises CacheFull if ``max_sequences`` are open."""
        if not self._closed:
            raise CacheFull(1, 0)
        slot = self._closed.pop()
        self._lengths[slot] = 0
        return slot

    def free(self, sequence: int) -> None:
        """Close the sequence and free the places that no other sequence shares."""
        self.truncate(sequence, 0)
        del self._lengths[sequence]
        self._closed.append(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most the first ``length`` tokens; returns the length kept."""
        kept = min(self.length(sequence), checked_length(length))
        places = self.table[sequence, kept : self.length(sequence)]
        owners = self._owners[places] - 1  # a sequence holds no place twice
        self._owners[places] = owners
        orphaned = places[owners == 0][::-1]
        self._free[self._num_free : self._num_free + len(orphaned)] = orphaned
        self._num_free += len(orphaned)
        self._shorten(sequence, kept)
        return kept

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Create a sequence that shares the first ``length`` places of ``source``; return its handle and length."""
        kept = min(self.length(source), checked_length(length))
        sequence = self.open()
        places = self.table[source, :kept]
        self.table[sequence, :kept] = places
        self._owners[places] += 1
        self._lengths[sequence] = kept
        self._inherit(source, sequence, kept)
        return sequence, kept

    def adopt(self, num_tokens: int) -> tuple[int, NDArray[np.int32]]:
        """Create a sequence of ``num_tokens``; return its handle and the places for the caller to fill.

        Raises:
            StateRefused: it is longer than the context.
            CacheFull: no handle or no places left; nothing was changed.
        """
        self._check_adopted(num_tokens)
        sequence = self.open()
        places = self._take(num_tokens)
        self.table[sequence, :num_tokens] = places
        self._lengths[sequence] = num_tokens
        return sequence, places

    def free_tokens(self) -> int:
        """Number of places not used by any sequence."""
        return self._num_free

    def _take(self, num_tokens: int) -> NDArray[np.int32]:
        """Allocate free places, each with one owner."""
        places = self._free[self._num_free - num_tokens : self._num_free][::-1].copy()
        self._num_free -= num_tokens
        self._owners[places] = 1
        return places

    def append(self, spans: Sequence[Span], sizes: Sequence[int]) -> NDArray[np.int32]:
        """Allocate a place for every new token of checked spans; returns (num_tokens,) int32, span by span."""
        total = sum(sizes)
        places = self._take(total)
        if total == len(spans):  # one token each, the usual case
            self.table[[span.sequence for span in spans], [span.start for span in spans]] = places
        else:
            begin = 0
            for span, size in zip(spans, sizes, strict=True):
                self.table[span.sequence, span.start : span.start + size] = places[begin : begin + size]
                begin += size
        self._grow(spans, sizes)
        return places
