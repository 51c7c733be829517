"""The open sequences: handles, lengths and cells. Keeps llama.cpp's memory and our account in step.

A handle is llama.cpp's own sequence id, so it is below ``max_sequences``.

**Order of cells.** Attention adds up a sequence's positions in the order of their cells. Another order rounds
differently, and a small quantised model amplifies that to different words (measured on SmolLM2: 3 to 5 of 100
greedy tokens). llama.cpp itself reuses cells as they become free, so the order depends on what else was served. With
``keeps_order`` new tokens always go to cells above all others: cells of dropped tokens stay occupied by a sequence
of their own, the *grave*, until :class:`enginehouse_llamacpp.compaction.Compactor` moves the living together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginehouse.errors import CacheFull, InvalidSpan
from enginehouse_llamacpp.cells import CellMap, HeldCells
from enginehouse_llamacpp.compaction import Compactor
from enginehouse_llamacpp.memory import SequenceMemory

__all__ = ["SequenceTable"]

_MIN_DEAD_CELLS = 512
"""Dead cells are masked, not skipped by blocks, so each costs every token a little time; so many are cheap."""


class SequenceTable:
    """All open sequences of one context.

    Args:
        memory: llama.cpp's side.
        cells: our account of it.
        max_sequences: handles at once; with ``keeps_order`` llama.cpp needs one id more.
        max_live_cells: positions that sequences may hold together; with ``keeps_order`` fewer than there are.
        keeps_order: see above.
    """

    def __init__(
        self, memory: SequenceMemory, cells: CellMap, max_sequences: int, max_live_cells: int, keeps_order: bool
    ) -> None:
        self._memory, self._cells = memory, cells
        self._max_live_cells, self._keeps_order = max_live_cells, keeps_order
        self._grave = max_sequences
        self._compactor = Compactor(memory, cells)
        self._free = list(range(max_sequences - 1, -1, -1))
        self._open: dict[int, HeldCells] = {}

    @property
    def num_free_cells(self) -> int:
        """Positions that sequences may still take."""
        return self._max_live_cells - self._cells.num_live

    def open(self) -> int:
        """A handle for an empty sequence. Raises CacheFull when all are taken."""
        if not self._free:
            raise CacheFull(1, 0)
        sequence = self._free.pop()
        self._open[sequence] = HeldCells()
        return sequence

    def held(self, sequence: int) -> HeldCells:
        """What an open sequence holds. Raises InvalidSpan for an unknown handle."""
        held = self._open.get(sequence)
        if held is None:
            raise InvalidSpan(f"there is no open sequence {sequence}")
        return held

    def free(self, sequence: int) -> None:
        """Give a sequence back."""
        self._drop(sequence, self.held(sequence), 0)
        del self._open[sequence]
        self._free.append(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most ``length`` tokens; the length really kept, ``length`` or 0 when the memory cannot be cut."""
        held = self.held(sequence)
        length = max(length, 0)
        if length < held.length:
            self._drop(sequence, held, length if length and self._memory.can_cut(sequence, length) else 0)
        return held.length

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that shares the first tokens of ``source``, and how many it shares."""
        held = self.held(source)
        length = min(max(length, 0), held.length)
        target = self.open()
        if length < held.length and not self._memory.can_cut(source, length):
            length = 0
        if length:
            self._memory.share(source, target, 0, length)
            self._open[target] = self._cells.share(held, length)
        return target, length

    def append(self, held: Sequence[HeldCells], counts: Sequence[int]) -> int:
        """Take cells for ``counts`` new tokens of each sequence, before llama.cpp places them.

        Returns:
            llama.cpp's head before that, for :meth:`take_back`.

        Raises:
            CacheFull: there are not so many; nothing was changed.
        """
        num_tokens = sum(counts)
        if num_tokens > self.num_free_cells:
            raise CacheFull(num_tokens, self.num_free_cells)
        if self._keeps_order and self._needs_compaction(num_tokens):
            self._compact()
        head = self._cells.head
        cells = self._cells.allocate(num_tokens)
        begin = 0
        for sequence, count in zip(held, counts, strict=True):
            sequence.append(cells[begin : begin + count])
            begin += count
        return head

    def take_back(self, sequences: Iterable[int], lengths: Iterable[int], head: int) -> None:
        """Undo :meth:`append`: llama.cpp changed nothing and its head is where it was."""
        for sequence, length in zip(sequences, lengths, strict=True):
            self._empty(self._open[sequence], length)
        self._cells.head = head

    def resynchronise(self, sequences: Sequence[int]) -> dict[int, int]:
        """Take over llama.cpp's lengths after a batch of ``sequences`` ended early; returns them."""
        for sequence in sequences:
            held = self._open[sequence]
            self._empty(held, min(self._memory.length(sequence), held.length))
        return {sequence: self._open[sequence].length for sequence in sequences}

    def _drop(self, sequence: int, held: HeldCells, length: int) -> None:
        """Forget all tokens from ``length`` on, in llama.cpp's memory and in ours."""
        if self._keeps_order and held.length > length:
            self._memory.share(sequence, self._grave, length)
            self._memory.remove(sequence, length)
            self._cells.release(held, length)
            if self._cells.num_live == 0:
                self._bury_all()
        elif held.length > length:
            self._memory.remove(sequence, length)
            self._empty(held, length)

    def _empty(self, held: HeldCells, length: int) -> None:
        self._cells.empty(self._cells.release(held, length))

    def _needs_compaction(self, num_tokens: int) -> bool:
        """Whether there is no room above all cells, or so many dead ones that masking them costs more than moving."""
        cells = self._cells
        if cells.head + num_tokens > cells.num_cells:
            return True
        return cells.num_dead > max(_MIN_DEAD_CELLS, cells.num_live // 2)

    def _compact(self) -> None:
        self._bury_all()
        self._compactor.run(self._open)

    def _bury_all(self) -> None:
        """Tell llama.cpp that all dead cells are empty."""
        dead = self._cells.dead_cells()
        self._memory.remove(self._grave)
        self._cells.empty(dead)
