"""Which KV cells each sequence holds: the plugin's own account of llama.cpp's unified cache.

llama.cpp tells neither how many cells are free nor which it will use. Both follow from what we asked for: cells are
shared by forks, and new tokens go to the first free cells from a moving head. Keeping the account here answers
:meth:`free_tokens` without a call, and lets a batch that cannot fit be refused before anything changes.

Knows nothing of llama.cpp's functions; all methods are exact and cheap (numpy over one small array).
"""

from __future__ import annotations

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.errors import CacheFull

__all__ = ["CellMap", "Cells", "HeldCells"]

Cells = NDArray[np.int32]


@define
class HeldCells:
    """One sequence's cells in order of position; ``length`` of them are in use."""

    cells: Cells = field(factory=lambda: np.empty(64, np.int32))
    length: int = 0

    def append(self, cells: Cells) -> None:
        """Hold more cells, one per new token."""
        end = self.length + len(cells)
        if end > len(self.cells):
            self.cells = np.concatenate([self.cells, np.empty(max(end, len(self.cells)), np.int32)])
        self.cells[self.length : end] = cells
        self.length = end


class CellMap:
    """The cells of one cache.

    Invariants: ``references[cell]`` counts the sequences that hold ``cell``; ``num_free`` counts its zeros.

    Args:
        num_cells: KV positions in total.
        chunk_tokens: llama.cpp places this many tokens of a batch at once (its ``n_ubatch``).
    """

    def __init__(self, num_cells: int, chunk_tokens: int) -> None:
        self.num_cells = self.num_free = num_cells
        self._chunk_tokens = chunk_tokens
        self._references = np.zeros(num_cells, np.uint16)
        self._head = 0

    def allocate(self, num_tokens: int) -> Cells:
        """Take the cells that llama.cpp will use for the next ``num_tokens`` tokens.

        Returns:
            (num_tokens,) int32 cells in batch order.

        Raises:
            CacheFull: fewer are free; nothing was taken.

        Source: ``llama_kv_cache::find_slot`` of llama.cpp, for one stream and without sliding window.
        """
        if num_tokens > self.num_free:
            raise CacheFull(num_tokens, self.num_free)
        chunks = []
        for begin in range(0, num_tokens, self._chunk_tokens):
            count = min(self._chunk_tokens, num_tokens - begin)
            if self._head > self.num_cells - self.num_free + 2 * count:
                self._head = 0
            chunks.append(self._take(count))
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def _take(self, count: int) -> Cells:
        """The first ``count`` free cells from the head on, round the end."""
        ahead = self._references[self._head : self._head + count]
        if len(ahead) == count and not ahead.any():
            cells = np.arange(self._head, self._head + count, dtype=np.int32)
        else:
            free = np.flatnonzero(self._references == 0).astype(np.int32)
            first = int(np.searchsorted(free, self._head))
            cells = np.concatenate([free[first : first + count], free[: max(count - (len(free) - first), 0)]])
        self._references[cells] = 1
        self.num_free -= count
        self._head = int(cells[-1]) + 1
        return cells

    def share(self, source: HeldCells, length: int) -> HeldCells:
        """A second holder of the first ``length`` cells of ``source``."""
        shared = source.cells[:length].copy()
        self._references[shared] += 1
        return HeldCells(shared if length else np.empty(64, np.int32), length)

    def release(self, held: HeldCells, length: int) -> None:
        """Let go of all cells from position ``length`` on; those that nobody holds become free."""
        dropped = held.cells[length : held.length]
        held.length = length
        if not len(dropped):
            return
        self._references[dropped] -= 1
        freed = dropped[self._references[dropped] == 0]
        if len(freed):
            self.num_free += len(freed)
            self._head = min(self._head, int(freed.min()))
