"""States of recurrent layers of all sequences on the device, and which of them is whose.

:class:`StatePools` are the tensors; :class:`SequenceStates` is the bookkeeping of the runner, with checkpoints. Does
not know modules; ``mixers.py`` reads and writes the pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_hf.facts import StateForm

__all__ = ["NO_STATES", "SequenceStates", "State", "StatePools", "num_rows"]

State = tuple[Tensor, ...]
"""A copy of one row of all pools: per pool (num_layers, ...)."""


def num_rows(num_slots: int) -> int:
    """Number of rows for ``num_slots`` sequences, and for padding."""
    return 2 * (num_slots + 1)


@frozen(eq=False)
class _Place:
    """Location of a part of the states: the number of its pool, and of its layer in there."""

    pool: int
    layer: int


class StatePools:
    """One tensor for all parts of the same shape and type, (num_layers, num_rows, ...): a row is a state.

    A sequence owns two rows: a pass reads one and writes the other, so that a failed pass changes nothing, and the last
    one can be taken back. The last two rows are a dump for padding.

    Args:
        forms: parts of the state of a sequence.
        num_slots: number of sequences.
    """

    def __init__(self, forms: Sequence[StateForm], num_slots: int, device: torch.device) -> None:
        self.forms, self.num_rows = tuple(forms), num_rows(num_slots)
        grouped: dict[object, list[StateForm]] = {}
        for form in forms:
            grouped.setdefault((form.key[1:], form.shape, form.dtype), []).append(form)
        self._pools: list[Tensor] = []
        self._places: dict[tuple[int, str, int], _Place] = {}
        self._layers: dict[int, dict[tuple[str, int], Tensor]] = {}
        for group in grouped.values():
            shape = len(group), self.num_rows, *group[0].shape[1:]
            pool = torch.zeros(shape, dtype=group[0].dtype, device=device)
            for layer, form in enumerate(group):
                self._places[form.key] = _Place(len(self._pools), layer)
                self._layers.setdefault(form.key[0], {})[form.key[1:]] = pool[layer]
            self._pools.append(pool)

    @property
    def bytes_per_state(self) -> int:
        """Size of the state of a sequence."""
        return sum(form.num_bytes for form in self.forms)

    @property
    def dump_row(self) -> int:
        """Row read by padding, which writes the next one."""
        return self.num_rows - 2

    def layer(self, index: int) -> dict[tuple[str, int], Tensor]:
        """Return the rows of a layer, (num_rows, ...), by kind and number of the part."""
        return self._layers[index]

    def clear(self, row: int) -> None:
        """Make a row the state of an empty sequence."""
        for pool in self._pools:
            pool[:, row].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy a row to another."""
        for pool in self._pools:
            pool[:, target].copy_(pool[:, source])

    def read(self, row: int) -> State:
        """Return a copy of a row."""
        return tuple(pool[:, row].clone() for pool in self._pools)

    def write(self, row: int, state: State) -> None:
        """Overwrite a row."""
        for pool, part in zip(self._pools, state, strict=True):
            pool[:, row].copy_(part)

    def parts(self, state: State) -> Iterator[Tensor]:
        """Yield the parts of a copy in the order of ``forms``, (1, ...) each."""
        for form in self.forms:
            place = self._places[form.key]
            yield state[place.pool][place.layer][None]

    def joined(self, parts: Iterator[Tensor]) -> State:
        """Return the parts, in the order of ``forms``, as a copy of a row; reads as many as there are forms."""
        state = tuple(torch.empty_like(pool[:, 0]) for pool in self._pools)
        for form in self.forms:
            place = self._places[form.key]
            state[place.pool][place.layer].copy_(next(parts)[0])
        return state


NO_STATES = StatePools((), 0, torch.device("cpu"))
"""The pools of a model without recurrent layers."""


@define(eq=False)
class _Rows:
    """The rows of one sequence.

    Attributes:
        current: row of its state; the other one is next to it.
        before: length of the sequence whose state is in the other row; None if that is not known.
    """

    current: int
    before: int | None = None

    @property
    def other(self) -> int:
        return self.current ^ 1


class SequenceStates:
    """States and checkpoints by sequence. A sequence goes back to its state before the last pass, or to a checkpoint.

    The lengths of sequences are given by the caller, in tokens.

    Args:
        max_bytes: maximum size of all checkpoints.
    """

    def __init__(self, pools: StatePools, max_bytes: int) -> None:
        self._pools = pools
        self._checkpoints = Checkpoints[State](max_bytes)
        self._rows: dict[int, _Rows] = {}

    def open(self, sequence: int) -> None:
        """Give a new sequence the empty state."""
        self._rows[sequence] = _Rows(2 * sequence)
        self._pools.clear(2 * sequence)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        del self._rows[sequence]
        self._checkpoints.free(sequence)

    def sources(self, sequences: Sequence[int]) -> NDArray[np.int32]:
        """Return the rows that a pass over these sequences reads; it writes those beside them."""
        return np.array([self._rows[sequence].current for sequence in sequences], np.int32)

    def advance(self, sequence: int, before: int) -> None:
        """Record that a pass has appended tokens to a sequence of the length ``before``."""
        rows = self._rows[sequence]
        rows.current, rows.before = rows.other, before

    def kept_length(self, sequence: int, length: int, num_held: int) -> int:
        """Return the longest length up to ``length`` whose state is known, of a sequence of ``num_held`` tokens."""
        if length >= num_held:
            return num_held
        last, before = self._checkpoints.last_length(sequence, length), self._rows[sequence].before
        return last if before is None or before > length else max(last, before)

    def cut(self, sequence: int, kept: int, num_held: int) -> None:
        """Go back to a length that :meth:`kept_length` returned."""
        rows = self._rows[sequence]
        if kept < num_held:
            if kept == rows.before:
                rows.current = rows.other
            else:
                self._restore(sequence, kept, rows.current)
            rows.before = None
        self._checkpoints.cut(sequence, kept)

    def fork(self, source: int, sequence: int, kept: int, num_held: int) -> None:
        """Give a new sequence the state of ``source`` at the length ``kept`` of ``num_held``, and its checkpoints."""
        rows, target = self._rows[source], _Rows(2 * sequence)
        if kept in (num_held, rows.before):
            self._pools.copy(rows.current if kept == num_held else rows.other, target.current)
        else:
            self._restore(source, kept, target.current)
        self._rows[sequence] = target
        self._checkpoints.share(source, sequence, kept)

    def keep(self, sequence: int, length: int) -> None:
        """Keep a checkpoint of a sequence of ``length`` tokens."""
        if length and not self._checkpoints.has(sequence, length):
            state = self._pools.read(self._rows[sequence].current)
            self._checkpoints.keep(sequence, length, state, self._pools.bytes_per_state)

    def saved(self, sequence: int, length: int) -> tuple[list[int], Iterator[Tensor]]:
        """Return the lengths of checkpoints to save, and the parts of the state and of theirs, (1, ...) each."""
        kept = self._checkpoints.saved(sequence, length)
        states = [self._pools.read(self._rows[sequence].current), *(state for _, state in kept)]
        return [length for length, _ in kept], (part for state in states for part in self._pools.parts(state))

    def load(self, sequence: int, lengths: Sequence[int], parts: Iterator[Tensor]) -> None:
        """Give a new sequence a saved state and checkpoints at ``lengths``; ``parts`` are as :meth:`saved` returns."""
        self._rows[sequence] = _Rows(2 * sequence)
        self._pools.write(2 * sequence, self._pools.joined(parts))
        for length in lengths:
            self._checkpoints.keep(sequence, length, self._pools.joined(parts), self._pools.bytes_per_state)

    def _restore(self, sequence: int, length: int, row: int) -> None:
        """Write the state of a sequence at a checkpoint, or at its beginning, to a row."""
        if length:
            self._pools.write(row, self._checkpoints.state(sequence, length))
        else:
            self._pools.clear(row)
