"""The open sequences: handles, lengths and cells. Keeps llama.cpp's memory and our account in step.

A handle is llama.cpp's own sequence id, so it is below ``max_sequences``.

**Order of cells.** Attention adds up a sequence's positions in the order of their cells. Another order rounds
differently, and a small quantised model amplifies that to different words (measured on SmolLM2: 3 to 5 of 100
greedy tokens). llama.cpp itself reuses cells as they become free, so the order depends on what else was served. With
``keeps_order`` new tokens always go to cells above all others: cells of dropped tokens stay occupied by a sequence
of their own, the *grave*, until the living are moved together.

**Parking.** Cells of other sequences are masked, not skipped, so each costs every token a little time: 3,200 kept
ones made SmolLM2's steps a fifth slower. So when cells are moved anyway, sequences that no recent pass used are
copied out of the cache, and back when they are used: a hundredth of what computing them again would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StateRefused
from enginehouse.contract.saved_states import HEAD_BYTES, check_head, write_head
from enginehouse_llamacpp.cells import CellMap, HeldCells, Parked
from enginehouse_llamacpp.compaction import Compactor
from enginehouse_llamacpp.memory import SequenceMemory
from enginehouse_llamacpp.states import num_checked_bytes, state_array

__all__ = ["NUM_OWN_SEQUENCES", "SequenceTable"]

NUM_OWN_SEQUENCES = 2
"""llama.cpp ids that ``keeps_order`` needs beyond the handles: the grave, and one for moving parts."""

_MIN_GROWTH_CELLS = 512
"""Cells are moved at the earliest when so many new ones were taken since the last time."""

_IDLE_PASSES = 16
_MIN_PARKED_TOKENS = 32


class SequenceTable:
    """All open sequences of one context.

    Args:
        memory: llama.cpp's side.
        cells: our account of it.
        max_sequences: handles at once.
        max_tokens: positions that sequences may hold together; with ``keeps_order`` fewer than there are cells.
        keeps_order: see above.
        state_format: what saved sequences depend on besides the model.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        cells: CellMap,
        max_sequences: int,
        max_tokens: int,
        keeps_order: bool,
        *,
        state_format: str,
    ) -> None:
        self._memory, self._cells = memory, cells
        self._max_tokens, self._keeps_order = max_tokens, keeps_order
        self._state_format = state_format
        self._grave, self._mover = max_sequences, max_sequences + 1
        self._compactor = Compactor(memory, cells)
        self._free = list(range(max_sequences - 1, -1, -1))
        self._open: dict[int, HeldCells] = {}
        self._num_parked = self._num_passes = 0
        self._compact_at = _MIN_GROWTH_CELLS

    @property
    def num_free_tokens(self) -> int:
        """Positions that sequences may still take; parked ones count as taken, as they may come back."""
        return self._max_tokens - self._cells.num_live - self._num_parked

    def open(self) -> int:
        """A handle for an empty sequence. Raises CacheFull when all are taken."""
        if not self._free:
            raise CacheFull(1, 0)
        sequence = self._free.pop()
        self._open[sequence] = HeldCells(last_pass=self._num_passes)
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
        length = self.kept_length(sequence, length)
        if length < held.num_tokens:
            if length > held.length:
                self._wake(sequence, held)
            self._drop(sequence, held, length)
        return held.num_tokens

    def kept_length(self, sequence: int, length: int) -> int:
        """What :meth:`truncate` and :meth:`fork` keep of ``length`` tokens; changes nothing."""
        num_tokens = self.held(sequence).num_tokens
        length = min(max(length, 0), num_tokens)
        return length if length in (0, num_tokens) or self._memory.can_cut(sequence, length) else 0

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that shares the first tokens of ``source``, and how many it shares."""
        held = self.held(source)
        length = self.kept_length(source, length)
        target = self.open()
        if length > held.length:
            self._wake(source, held)
        if length:
            self._memory.share(source, target, 0, length)
            self._open[target] = self._cells.share(held, length)
            self._open[target].last_pass = self._num_passes
        return target, length

    def save(self, sequence: int) -> memoryview:
        """A copy of an open sequence, parked tokens included, as bytes."""
        held = self.held(sequence)
        if held.parked:
            self._wake(sequence, held)
        if not held.length:
            raise InvalidSpan(f"sequence {sequence} holds nothing that could be saved")
        data = memoryview(self._memory.save(sequence, HEAD_BYTES)).cast("B")
        write_head(data, self._state_format, held.length, num_checked=num_checked_bytes(held.length))
        return data

    def load(self, data: memoryview) -> int:
        """A new sequence from what :meth:`save` returned; see :class:`enginehouse.contract.backend.StateKeeper`."""
        num_tokens = check_head(data, self._state_format)
        if num_tokens > self.num_free_tokens:
            raise CacheFull(num_tokens, self.num_free_tokens)
        sequence = self.open()
        held = self._open[sequence]
        self._make_room(num_tokens)
        held.append(self._cells.allocate(num_tokens, chunk_tokens=num_tokens))
        try:
            self._memory.restore(sequence, state_array(data))
            if self._memory.length(sequence) != num_tokens:
                raise RunnerError("it holds another number of tokens than it says")
        except RunnerError as error:
            self._memory.remove(sequence)
            self._empty(held, 0)
            self.free(sequence)
            raise StateRefused(error.message) from error
        return sequence

    def append(self, sequences: Sequence[int], counts: Sequence[int]) -> int:
        """Take cells for ``counts`` new tokens of each sequence, before llama.cpp places them.

        Returns:
            llama.cpp's head before that, for :meth:`take_back`.

        Raises:
            CacheFull: there are not so many; nothing was changed.
        """
        num_tokens = sum(counts)
        if num_tokens > self.num_free_tokens:
            raise CacheFull(num_tokens, self.num_free_tokens)
        self._num_passes += 1
        all_held = [self._open[sequence] for sequence in sequences]
        for held in all_held:
            held.last_pass = self._num_passes
        for sequence, held in zip(sequences, all_held, strict=True):
            if held.parked:
                self._wake(sequence, held)
        self._make_room(num_tokens)
        head = self._cells.head
        cells = self._cells.allocate(num_tokens)
        begin = 0
        for held, count in zip(all_held, counts, strict=True):
            held.append(cells[begin : begin + count])
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
        """Forget all tokens from ``length`` on, which must not be parked, in llama.cpp's memory and in ours."""
        self._forget_parked(held)
        if held.length <= length:
            return
        if not self._keeps_order:
            self._memory.remove(sequence, length)
            self._empty(held, length)
            return
        self._memory.share(sequence, self._grave, length)
        self._memory.remove(sequence, length)
        self._cells.release(held, length)
        if self._cells.num_live == 0:
            self._empty_grave()
            self._compact_at = _MIN_GROWTH_CELLS

    def _empty(self, held: HeldCells, length: int) -> None:
        self._cells.empty(self._cells.release(held, length))

    def _make_room(self, num_tokens: int) -> None:
        """With ``keeps_order``: so many empty cells above all others."""
        if not self._keeps_order:
            return
        if self._cells.head + num_tokens > min(self._compact_at, self._cells.num_cells):
            self._empty_grave()
            for sequence, held in self._open.items():
                if held.last_pass + _IDLE_PASSES < self._num_passes:
                    self._park(sequence, held)
            self._compactor.run(self._open)
            self._compact_at = self._cells.head + num_tokens + max(_MIN_GROWTH_CELLS, self._cells.head // 2)

    def _empty_grave(self) -> None:
        """Tell llama.cpp that all dead cells are empty."""
        dead = self._cells.dead_cells()
        self._memory.remove(self._grave)
        self._cells.empty(dead)

    def _park(self, sequence: int, held: HeldCells) -> None:
        """Copy what only this sequence holds out of the cache."""
        start = self._cells.num_shared(held)
        if held.parked or held.length - start < _MIN_PARKED_TOKENS:
            return
        self._memory.share(sequence, self._mover, start)
        data = self._memory.save(self._mover)
        self._memory.remove(self._mover)
        self._memory.remove(sequence, start)
        held.parked = Parked(held.length - start, data)
        self._num_parked += held.parked.num_tokens
        self._empty(held, start)

    def _wake(self, sequence: int, held: HeldCells) -> None:
        """Copy parked tokens back into cells."""
        parked = held.parked
        assert parked is not None
        held.last_pass = self._num_passes
        self._make_room(parked.num_tokens)
        self._forget_parked(held)
        self._memory.restore(self._mover, parked.data)
        self._memory.share(self._mover, sequence)
        self._memory.remove(self._mover)
        held.append(self._cells.allocate(parked.num_tokens, chunk_tokens=parked.num_tokens))

    def _forget_parked(self, held: HeldCells) -> None:
        if held.parked:
            self._num_parked -= held.parked.num_tokens
            held.parked = None
