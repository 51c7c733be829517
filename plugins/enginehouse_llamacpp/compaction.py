"""Compacts live cells at the beginning of the cache; keeps each sequence's order and all sharing.

Costs two copies of the moved cells. Cells below the first gap are not moved, so prefixes that stay cached for long are
moved once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import define

from enginehouse_llamacpp.cells import CellMap, HeldCells
from enginehouse_llamacpp.memory import SequenceMemory

__all__ = ["Compactor"]


@define
class _Move:
    """A sequence to move: its own cells begin at ``shared``; the cells before that come from ``parent``."""

    sequence: int
    held: HeldCells
    parent: int = -1
    parent_held: HeldCells | None = None
    shared: int = 0


class Compactor:
    """Compacts one cache. Each sequence's cells must ascend with position, and there must be no dead cells."""

    def __init__(self, memory: SequenceMemory, cells: CellMap) -> None:
        self._memory, self._cells = memory, cells

    def run(self, sequences: Mapping[int, HeldCells]) -> None:
        """Move all cells above the first empty one. Afterwards all empty cells are above all others."""
        moves = self._plan(sequences)
        for move in moves:
            # A sequence that holds only its own cells is saved without the shared ones.
            if move.shared:
                self._memory.remove(move.sequence, 0, move.held.chunks.position(move.shared))
                self._cells.detach(move.held, move.shared)
        for move in moves:
            self._slide(move)

    def _plan(self, sequences: Mapping[int, HeldCells]) -> list[_Move]:
        """Return the sequences to move, ordered so that a parent comes before the sequences that share its cells."""
        gap = self._cells.first_empty()
        placed = {sequence: held for sequence, held in sequences.items() if held.length and held.is_below(gap)}
        rest = [item for item in sequences.items() if item[1].length and item[0] not in placed]
        moves = []
        for sequence, held in sorted(rest, key=lambda item: int(item[1].cells[-1])):
            move = _Move(sequence, held)
            for parent, parent_held in placed.items():
                shared = _common_length(held, parent_held)
                if shared > move.shared:
                    move.parent, move.parent_held, move.shared = parent, parent_held, shared
            placed[sequence] = held
            moves.append(move)
        return moves

    def _slide(self, move: _Move) -> None:
        """Move one sequence's own cells down to the first empty ones and reattach it to its parent."""
        num_own = move.held.length - move.shared
        if num_own:
            data = self._memory.save(move.sequence)
            self._memory.remove(move.sequence)
            self._cells.empty(self._cells.release(move.held, move.shared))
            self._memory.restore(move.sequence, data)
            move.held.append(self._cells.allocate(num_own, chunk_tokens=num_own))
        if move.parent_held is not None:
            self._memory.share(move.parent, move.sequence, 0, move.held.chunks.position(move.shared))
            self._cells.attach(move.held, move.parent_held, move.shared)


def _common_length(left: HeldCells, right: HeldCells) -> int:
    """Number of leading cells shared by two sequences."""
    count = min(left.length, right.length)
    if count == 0 or left.room[0] != right.room[0]:
        return 0
    differs = left.room[:count] != right.room[:count]
    return int(np.argmax(differs)) if differs.any() else count
