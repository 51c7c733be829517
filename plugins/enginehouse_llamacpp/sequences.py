"""The open sequences: handles, lengths and cells. Keeps llama.cpp's memory and our account in step.

A handle is llama.cpp's own sequence id, so it is below ``max_sequences``.
"""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.errors import CacheFull, InvalidSpan
from enginehouse_llamacpp.cells import CellMap, HeldCells
from enginehouse_llamacpp.memory import SequenceMemory

__all__ = ["SequenceTable"]


class SequenceTable:
    """All open sequences of one context."""

    def __init__(self, memory: SequenceMemory, cells: CellMap, max_sequences: int) -> None:
        self._memory, self._cells = memory, cells
        self._free = list(range(max_sequences - 1, -1, -1))
        self._open: dict[int, HeldCells] = {}

    def open(self) -> int:
        """A handle for an empty sequence. Raises CacheFull when all are taken."""
        if not self._free:
            raise CacheFull(1, 0)
        sequence = self._free.pop()
        self._open[sequence] = HeldCells()
        return sequence

    def free(self, sequence: int) -> None:
        """Give a sequence back."""
        held = self.held(sequence)
        self._memory.remove(sequence)
        self._cells.release(held, 0)
        del self._open[sequence]
        self._free.append(sequence)

    def held(self, sequence: int) -> HeldCells:
        """What an open sequence holds. Raises InvalidSpan for an unknown handle."""
        held = self._open.get(sequence)
        if held is None:
            raise InvalidSpan(f"there is no open sequence {sequence}")
        return held

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most ``length`` tokens; the length really kept."""
        held = self.held(sequence)
        if length < held.length:
            self._cells.release(held, self._memory.truncate(sequence, max(length, 0)))
        return held.length

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that shares the first tokens of ``source``, and how many it shares."""
        held = self.held(source)
        length = min(max(length, 0), held.length)
        target = self.open()
        shared = self._memory.share(source, target, length, held.length)
        self._open[target] = self._cells.share(held, shared)
        return target, shared

    def resynchronise(self, sequences: Iterable[int]) -> dict[int, int]:
        """Take over llama.cpp's lengths after a batch of ``sequences`` ended early; returns them."""
        for sequence in sequences:
            held = self._open[sequence]
            self._cells.release(held, min(self._memory.length(sequence), held.length))
        return {sequence: self._open[sequence].length for sequence in sequences}
