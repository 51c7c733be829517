"""KV cells of each sequence: the plugin's own bookkeeping of llama.cpp's unified cache.

llama.cpp reports neither the number of free cells nor which cells it will use. Both follow from the calls made: forks
share cells, and new tokens go to the first empty cells after a moving head. This bookkeeping answers ``free_tokens``
without a call, and allows a batch that cannot fit to be refused before anything changes.

A cell is *live* while a sequence holds it. A cell that is no longer held by any sequence is *dead* until llama.cpp is
told to remove it, and *empty* from then on. Does not know llama.cpp's functions; all methods are numpy operations on
one small array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse_backendkit.media_chunks import NO_CHUNKS, Chunks

__all__ = ["CellMap", "Cells", "HeldCells", "SwappedOut"]

Cells = NDArray[np.int32]
"""(num_cells,) int32 indices of cells."""

_FIRST_ROOM = 64


@frozen(eq=False)
class SwappedOut:
    """Last tokens of a sequence, swapped out of the cache."""

    num_tokens: int
    data: Any


@define(eq=False)
class HeldCells:
    """Cells of one sequence in order of position.

    Attributes:
        room: buffer of cells, of which the first ``length`` entries are in use.
        length: number of tokens in cells.
        swapped_out: tokens after those, while they are swapped out.
        last_pass: number of the last forward pass that used the sequence.
        chunks: where its images are, swapped-out ones included.
    """

    room: Cells = field(factory=lambda: np.empty(_FIRST_ROOM, np.int32))
    length: int = 0
    swapped_out: SwappedOut | None = None
    last_pass: int = 0
    chunks: Chunks = NO_CHUNKS

    @property
    def cells(self) -> Cells:
        """View of the cells in use."""
        return self.room[: self.length]

    def append(self, cells: Cells) -> None:
        """Append cells, one per new token."""
        end = self.length + len(cells)
        if end > len(self.room):
            self.room = np.concatenate([self.cells, np.empty(max(end, len(self.room)), np.int32)])
        self.room[self.length : end] = cells
        self.length = end

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence: those in cells plus those swapped out."""
        return self.length + (self.swapped_out.num_tokens if self.swapped_out else 0)

    def is_below(self, cell: int) -> bool:
        """True if all cells are before ``cell``. Requires ordered cells, whose last is the highest."""
        return self.length == 0 or int(self.room[self.length - 1]) < cell


class CellMap:
    """Reference counts of the cells of one cache.

    Invariants: ``num_live`` counts the cells with references, ``num_dead`` the occupied cells without; an empty cell
    has no references.

    Args:
        num_cells: KV positions in total.
        chunk_tokens: number of tokens of a batch that llama.cpp places at once (its ``n_ubatch``).
    """

    def __init__(self, num_cells: int, chunk_tokens: int) -> None:
        self.num_cells = num_cells
        self.num_live = self.num_dead = 0
        self.head = 0
        self._chunk_tokens = chunk_tokens
        self._references = np.zeros(num_cells, np.uint16)
        self._is_occupied = np.zeros(num_cells, np.bool_)

    @property
    def num_empty(self) -> int:
        """Number of cells that llama.cpp can use now."""
        return self.num_cells - self.num_live - self.num_dead

    def allocate(self, num_tokens: int, chunk_tokens: int | None = None) -> Cells:
        """Allocate the cells that llama.cpp will use for the next ``num_tokens`` tokens; that many must be empty.

        Returns:
            (num_tokens,) int32 cells in batch order.

        Source: ``llama_kv_cache::find_slot`` of llama.cpp, for one stream and without a sliding window.
        """
        step = chunk_tokens or self._chunk_tokens
        if num_tokens <= step:
            return self._take(num_tokens)
        return np.concatenate([self._take(min(step, num_tokens - at)) for at in range(0, num_tokens, step)])

    def _take(self, count: int) -> Cells:
        """Take the first ``count`` empty cells starting at the head, wrapping around at the end."""
        if self.head > self.num_live + self.num_dead + 2 * count:
            self.head = 0
        ahead = self._is_occupied[self.head : self.head + count]
        if len(ahead) == count and not ahead.any():
            cells = np.arange(self.head, self.head + count, dtype=np.int32)
        else:
            empty = np.flatnonzero(~self._is_occupied).astype(np.int32)
            first = int(np.searchsorted(empty, self.head))
            cells = np.concatenate([empty[first : first + count], empty[: max(count - (len(empty) - first), 0)]])
        self._references[cells] = 1
        self._is_occupied[cells] = True
        self.num_live += count
        self.head = int(cells[-1]) + 1
        return cells

    def share(self, source: HeldCells, length: int) -> HeldCells:
        """Create a second holder of the first ``length`` cells of ``source``."""
        shared = HeldCells()
        shared.append(source.room[:length])
        shared.chunks = source.chunks.cut(length)
        self._references[shared.cells] += 1
        return shared

    def detach(self, held: HeldCells, length: int) -> None:
        """Remove the references of ``held`` to its first ``length`` cells, which other sequences hold too."""
        self._references[held.room[:length]] -= 1

    def attach(self, held: HeldCells, source: HeldCells, length: int) -> None:
        """Make ``held`` begin with the first ``length`` cells of ``source``, replacing those it was detached from."""
        held.room[:length] = source.room[:length]
        self._references[held.room[:length]] += 1

    def num_shared(self, held: HeldCells) -> int:
        """Number of cells that other sequences hold too; always the first ones, because forks share prefixes."""
        return int(np.count_nonzero(self._references[held.cells] > 1))

    def release(self, held: HeldCells, length: int) -> Cells:
        """Release all cells from position ``length`` on. Cells without other holders become dead.

        Returns:
            The cells that became dead.
        """
        dropped = held.room[length : held.length]
        held.length = length
        self._references[dropped] -= 1
        dead: Cells = dropped[self._references[dropped] == 0]
        self.num_live -= len(dead)
        self.num_dead += len(dead)
        return dead

    def empty(self, dead: Cells) -> None:
        """Mark dead cells as empty after llama.cpp has removed them; its head moves back to the first of them."""
        if len(dead):
            self._is_occupied[dead] = False
            self.num_dead -= len(dead)
            self.head = min(self.head, int(dead.min()))

    def dead_cells(self) -> Cells:
        """All dead cells, ascending."""
        return np.flatnonzero(self._is_occupied & (self._references == 0)).astype(np.int32)

    def first_empty(self) -> int:
        """The lowest empty cell; ``num_cells`` when there is none."""
        return int(np.argmin(self._is_occupied)) if self.num_empty else self.num_cells
