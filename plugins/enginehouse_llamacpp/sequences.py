"""Open sequences: handles, lengths and cells. Keeps llama.cpp's memory and our bookkeeping in sync.

A handle is llama.cpp's own sequence id, so it is below ``max_sequences``.

**Order of cells.** Attention sums over a sequence's positions in the order of their cells. A different order rounds
differently, and a small quantised model amplifies that to different words (measured on SmolLM2: 3 to 5 of 100
greedy tokens). llama.cpp itself reuses cells as they become free, so the order depends on the other requests. With
``keeps_order`` new tokens always go to cells above all others: cells of dropped tokens stay allocated to a separate
sequence, the *discard sequence*, until the live cells are compacted.

**Parking (swapping out).** Cells of other sequences are masked, not skipped, so each slows every token slightly: 3,200
cached ones made SmolLM2's steps a fifth slower. Therefore compaction also copies sequences that no recent pass used out
of the cache. They are copied back on use, at a hundredth of the cost of recomputing them.

**Checkpoints.** A recurrent state has only its newest position, so copies of it are kept where the engine asks. To go
back to one, the state is restored first; then llama.cpp removes later positions of the other layers.

**Images.** All lengths here are in tokens; llama.cpp's memory takes positions
(:mod:`enginehouse_backendkit.media_chunks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StateRefused
from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_backendkit.media_chunks import ChunkPlace, Chunks
from enginehouse_backendkit.saved_states import HEAD_BYTES, check_head, state_body, write_head
from enginehouse_llamacpp.cells import CellMap, HeldCells, SwappedOut
from enginehouse_llamacpp.compaction import Compactor
from enginehouse_llamacpp.memory import SequenceMemory, State
from enginehouse_llamacpp.states import num_checked_bytes, pack_checkpoints, state_array, unpack_checkpoints

__all__ = ["NUM_OWN_SEQUENCES", "SequenceTable"]

NUM_OWN_SEQUENCES = 2
"""llama.cpp ids that ``keeps_order`` needs beyond the handles: the discard sequence, and one for moving parts."""

_MIN_GROWTH_CELLS = 512
"""Minimum number of cells allocated since the last compaction before the next one."""

_IDLE_PASSES = 16
_MIN_PARKED_TOKENS = 32


class SequenceTable:
    """All open sequences of one context.

    Args:
        memory: llama.cpp's memory.
        cells: our bookkeeping of it.
        max_sequences: maximum number of open handles.
        max_tokens: positions that all sequences may hold together; with ``keeps_order`` fewer than there are cells.
        keeps_order: see the module docstring.
        state_format: identifies what saved sequences depend on besides the model.
        max_checkpoints: maximum number of checkpoints of all sequences.
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
        max_checkpoints: int = 0,
    ) -> None:
        self._memory, self._cells = memory, cells
        self._max_tokens, self._keeps_order = max_tokens, keeps_order
        self._state_format = state_format
        self._free_list, self._mover = max_sequences, max_sequences + 1
        self._checkpoints = Checkpoints[State](max_checkpoints)  # all have the same size, so they are counted
        self._compactor = Compactor(memory, cells)
        self._free = list(range(max_sequences - 1, -1, -1))
        self._open: dict[int, HeldCells] = {}
        self._num_swapped_out = self._num_passes = 0
        self._compact_at = _MIN_GROWTH_CELLS

    @property
    def num_free_tokens(self) -> int:
        """Number of positions that sequences may still take; swapped-out ones count as taken, as they may return."""
        return self._max_tokens - self._cells.num_live - self._num_swapped_out

    def open(self) -> int:
        """Return a handle for an empty sequence. Raises CacheFull if all are taken."""
        if not self._free:
            raise CacheFull(1, 0)
        sequence = self._free.pop()
        self._open[sequence] = HeldCells(last_pass=self._num_passes)
        return sequence

    def held(self, sequence: int) -> HeldCells:
        """Return the cells of an open sequence. Raises InvalidSpan for an unknown handle."""
        held = self._open.get(sequence)
        if held is None:
            raise InvalidSpan(f"sequence {sequence} is not open")
        return held

    def free(self, sequence: int) -> None:
        """Free a sequence."""
        self._drop(sequence, self.held(sequence), 0)
        self._checkpoints.free(sequence)
        del self._open[sequence]
        self._free.append(sequence)

    def position(self, sequence: int) -> int:
        """Position of the next token of a sequence."""
        held = self.held(sequence)
        return held.chunks.position(held.num_tokens)

    def truncate(self, sequence: int, length: int) -> int:
        """Truncate to at most ``length`` tokens; see :meth:`kept_length`."""
        held = self.held(sequence)
        length = self.kept_length(sequence, length)
        if length < held.num_tokens:
            if length > held.length:
                self._wake(sequence, held)
            self._go_back(sequence, sequence, length)
            self._drop(sequence, held, length)
        return held.num_tokens

    def keep_checkpoint(self, sequence: int) -> None:
        """Keep a copy of the state of a sequence; see :class:`enginehouse.contract.checkpoints.CheckpointKeeper`."""
        length = self.held(sequence).num_tokens
        if length and not self._checkpoints.has(sequence, length):
            self._checkpoints.keep(sequence, length, self._memory.save_state(sequence), 1)

    def _go_back(self, source: int, target: int, length: int) -> None:
        """Restore the state that ``source`` had at ``length``, or none at 0, into ``target``, which may be the same."""
        if self._memory.is_recurrent:
            if length:
                self._memory.restore_state(target, self._checkpoints.state(source, length))
            self._checkpoints.cut(target, length)

    def kept_length(self, sequence: int, length: int) -> int:
        """Length that :meth:`truncate` and :meth:`fork` would keep of ``length`` tokens; changes nothing.

        It is ``length``, or the beginning of the image that it is in, or if the memory cannot be cut, the length of the
        last checkpoint, or 0.
        """
        held = self.held(sequence)
        num_tokens = held.num_tokens
        length = held.chunks.whole(min(max(length, 0), num_tokens))
        if length in (0, num_tokens) or self._memory.can_cut(sequence, held.chunks.position(length)):
            return length
        return self._checkpoints.last_length(sequence, length)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Create a sequence that shares the first tokens of ``source``; return it and the number of shared tokens."""
        held = self.held(source)
        length = self.kept_length(source, length)
        target = self.open()
        try:
            if length > held.length:
                self._wake(source, held)
            if length:
                self._memory.share(source, target, 0, held.chunks.position(length))
                self._open[target] = self._cells.share(held, length)
                self._open[target].last_pass = self._num_passes
                self._checkpoints.share(source, target, length)
                if length < held.num_tokens:
                    self._go_back(source, target, length)
        except BaseException:
            self.free(target)
            raise
        return target, length

    def save(self, sequence: int) -> memoryview:
        """Return a copy of an open sequence as bytes, swapped-out tokens included."""
        held = self.held(sequence)
        if held.swapped_out:
            self._wake(sequence, held)
        if not held.length:
            raise InvalidSpan(f"sequence {sequence} holds nothing that could be saved")
        more = held.chunks.to_bytes()
        if self._memory.is_recurrent:
            more += pack_checkpoints(self._checkpoints.saved(sequence, held.length))
        begin = HEAD_BYTES + len(more)
        data = memoryview(self._memory.save(sequence, begin)).cast("B")
        data[HEAD_BYTES:begin] = more
        write_head(data, self._state_format, held.length, num_checked=len(more) + num_checked_bytes(held.length))
        return data

    def load(self, data: memoryview) -> int:
        """Create a sequence from saved data; see :class:`enginehouse.contract.backend.StateKeeper`."""
        num_tokens = check_head(data, self._state_format)
        chunks, num_more_bytes = Chunks.from_bytes(state_body(data), num_tokens)
        checkpoints: Sequence[tuple[int, State]] = ()
        if self._memory.is_recurrent:
            checkpoints, num_bytes = unpack_checkpoints(state_body(data)[num_more_bytes:], num_tokens)
            num_more_bytes += num_bytes
        if num_tokens > self.num_free_tokens:
            raise CacheFull(num_tokens, self.num_free_tokens)
        sequence = self.open()
        held = self._open[sequence]
        self._make_room(num_tokens)
        held.append(self._cells.allocate(num_tokens, chunk_tokens=num_tokens))
        try:
            self._memory.restore(sequence, state_array(data, HEAD_BYTES + num_more_bytes))
            held.chunks = chunks
            if chunks.num_tokens(self._memory.next_position(sequence)) != num_tokens:
                raise RunnerError("its number of tokens differs from the one in its header")
        except RunnerError as error:
            self._memory.remove(sequence)
            self._empty(held, 0)
            self.free(sequence)
            raise StateRefused(error.message) from error
        for length, state in checkpoints:
            self._checkpoints.keep(sequence, length, state, 1)
        return sequence

    def append(self, sequences: Sequence[int], counts: Sequence[int]) -> int:
        """Allocate cells for ``counts`` new tokens of each sequence, before llama.cpp places them.

        Returns:
            llama.cpp's previous head, for :meth:`take_back`.

        Raises:
            CacheFull: there are not enough cells; nothing was changed.
        """
        num_tokens = sum(counts)
        if num_tokens > self.num_free_tokens:
            raise CacheFull(num_tokens, self.num_free_tokens)
        self._num_passes += 1
        all_held = [self._open[sequence] for sequence in sequences]
        for held in all_held:
            held.last_pass = self._num_passes
        for sequence, held in zip(sequences, all_held, strict=True):
            if held.swapped_out:
                self._wake(sequence, held)
        self._make_room(num_tokens)
        head = self._cells.head
        cells = self._cells.allocate(num_tokens)
        begin = 0
        for held, count in zip(all_held, counts, strict=True):
            held.append(cells[begin : begin + count])
            begin += count
        return head

    def append_chunk(self, sequence: int, counts: Sequence[int], num_positions: int) -> None:
        """Allocate cells for an image, which llama.cpp will place in batches of ``counts`` tokens.

        Raises:
            CacheFull: there are not enough cells; nothing was changed.
        """
        num_tokens, held = sum(counts), self._open[sequence]
        if num_tokens > self.num_free_tokens:
            raise CacheFull(num_tokens, self.num_free_tokens)
        self._num_passes += 1
        held.last_pass = self._num_passes
        if held.swapped_out:
            self._wake(sequence, held)
        self._make_room(num_tokens)
        held.chunks = held.chunks.adding(ChunkPlace(held.length, num_tokens, num_positions))
        for count in counts:
            held.append(self._cells.allocate(count))

    def drop_chunk(self, sequence: int) -> None:
        """Undo :meth:`append_chunk` after llama.cpp has placed all of the image, a part or nothing.

        A memory that cannot be cut there goes back to a checkpoint, or loses the whole sequence.
        """
        held = self._open[sequence]
        start = held.chunks.places[-1].start
        position = held.chunks.position(start)
        if self._memory.next_position(sequence) > position and not self._memory.can_cut(sequence, position):
            start = self._checkpoints.last_length(sequence, start)
            self._go_back(sequence, sequence, start)
        self._memory.remove(sequence, held.chunks.position(start))
        self._empty(held, start)

    def take_back(self, sequences: Iterable[int], lengths: Iterable[int], head: int) -> None:
        """Undo :meth:`append` after llama.cpp changed nothing and kept its head."""
        for sequence, length in zip(sequences, lengths, strict=True):
            self._empty(self._open[sequence], length)
        self._cells.head = head

    def resynchronise(self, sequences: Sequence[int], starts: Sequence[int]) -> dict[int, int]:
        """Update lengths from llama.cpp after a batch of ``sequences`` ended early; return them.

        A recurrent state may then be that of any token of the batch: the sequence goes back to before its ``starts``.
        """
        for sequence, start in zip(sequences, starts, strict=True):
            held = self._open[sequence]
            if self._memory.is_recurrent and held.length > start:
                kept = self._checkpoints.last_length(sequence, start)
                self._go_back(sequence, sequence, kept)
                self._memory.remove(sequence, held.chunks.position(kept))
                self._empty(held, kept)
                continue
            num_tokens = held.chunks.num_tokens(self._memory.next_position(sequence))
            self._empty(held, min(num_tokens, held.length))
        return {sequence: self._open[sequence].length for sequence in sequences}

    def _drop(self, sequence: int, held: HeldCells, length: int) -> None:
        """Drop all tokens from ``length`` on, which must not be swapped out, in llama.cpp's memory and in ours."""
        self._forget_swapped_out(held)
        if held.length <= length:
            return
        position = held.chunks.position(length)
        if not self._keeps_order:
            self._memory.remove(sequence, position)
            self._empty(held, length)
            return
        self._memory.share(sequence, self._free_list, position)
        self._memory.remove(sequence, position)
        self._cells.release(held, length)
        held.chunks = held.chunks.cut(length)
        if self._cells.num_live == 0:
            self._empty_free_list()
            self._compact_at = _MIN_GROWTH_CELLS

    def _empty(self, held: HeldCells, length: int) -> None:
        """Take cells from a sequence that llama.cpp has already taken from it."""
        self._cells.empty(self._cells.release(held, length))
        held.chunks = held.chunks.cut(length)

    def _make_room(self, num_tokens: int) -> None:
        """With ``keeps_order``: ensure ``num_tokens`` empty cells above all others."""
        if not self._keeps_order:
            return
        if self._cells.head + num_tokens > min(self._compact_at, self._cells.num_cells):
            self._empty_free_list()
            for sequence, held in self._open.items():
                if held.last_pass + _IDLE_PASSES < self._num_passes:
                    self._park(sequence, held)
            self._compactor.run(self._open)
            self._compact_at = self._cells.head + num_tokens + max(_MIN_GROWTH_CELLS, self._cells.head // 2)

    def _empty_free_list(self) -> None:
        """Tell llama.cpp that all dead cells are empty."""
        dead = self._cells.dead_cells()
        self._memory.remove(self._free_list)
        self._cells.empty(dead)

    def _park(self, sequence: int, held: HeldCells) -> None:
        """Swap out the tokens that only this sequence holds."""
        start = self._cells.num_shared(held)
        if held.swapped_out or held.length - start < _MIN_PARKED_TOKENS:
            return
        position = held.chunks.position(start)
        self._memory.share(sequence, self._mover, position)
        data = self._memory.save(self._mover)
        self._memory.remove(self._mover)
        self._memory.remove(sequence, position)
        held.swapped_out = SwappedOut(held.length - start, data)
        self._num_swapped_out += held.swapped_out.num_tokens
        self._cells.empty(self._cells.release(held, start))

    def _wake(self, sequence: int, held: HeldCells) -> None:
        """Copy swapped-out tokens back into cells."""
        swapped_out = held.swapped_out
        assert swapped_out is not None
        held.last_pass = self._num_passes
        self._make_room(swapped_out.num_tokens)
        self._forget_swapped_out(held)
        self._memory.restore(self._mover, swapped_out.data)
        self._memory.share(self._mover, sequence)
        self._memory.remove(self._mover)
        held.append(self._cells.allocate(swapped_out.num_tokens, chunk_tokens=swapped_out.num_tokens))

    def _forget_swapped_out(self, held: HeldCells) -> None:
        if held.swapped_out:
            self._num_swapped_out -= held.swapped_out.num_tokens
            held.swapped_out = None
