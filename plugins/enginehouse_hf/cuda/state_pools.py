"""States of recurrent layers of all sequences on the device, and which of them is whose.

:class:`StatePools` are the tensors; :class:`SequenceStates` is the bookkeeping of the runner, with checkpoints. Does
not know modules; ``mixers.py`` reads and writes the pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_hf.facts import StateForm

__all__ = ["NO_STATES", "SequenceStates", "State", "StatePools", "num_rows"]

State = tuple[Tensor, ...]
"""A copy of one row of all pools: per pool (num_layers, ...)."""


def num_rows(num_slots: int, max_tokens: int = 1) -> int:
    """Number of rows for ``num_slots`` sequences, and for padding; see :class:`StatePools`."""
    return (1 + max_tokens) * (num_slots + 1)


@frozen(eq=False)
class _Place:
    """Location of a part of the states: the number of its pool, and of its layer in there."""

    pool: int
    layer: int


class StatePools:
    """One tensor for all parts of the same shape and type, (num_layers, num_rows, ...): a row is a state.

    A sequence owns some rows in a circle: a pass reads one and writes the next, so that a failed pass changes nothing,
    and the last one can be taken back. A pass that verifies drafts writes one after each of its tokens. The last rows
    are a dump for padding.

    Args:
        forms: parts of the state of a sequence.
        num_slots: number of sequences.
        max_tokens: most tokens of a sequence after each of which a pass keeps the state.
    """

    def __init__(self, forms: Sequence[StateForm], num_slots: int, device: torch.device, max_tokens: int = 1) -> None:
        self.forms, self.num_slots, self.max_tokens = tuple(forms), num_slots, max_tokens
        self.num_rows = num_rows(num_slots, max_tokens)
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

    def first_row(self, slot: int) -> int:
        """Return the first of the rows of a sequence."""
        return slot * (1 + self.max_tokens)

    def dump_rows(self, num_tokens: int) -> NDArray[np.int32]:
        """(num_tokens + 1,), rows read and written by padding."""
        return np.arange(num_tokens + 1, dtype=np.int32) + self.first_row(self.num_slots)

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
        current: row of its state.
        earlier: rows of its states at other lengths, before and within the last pass.
    """

    current: int
    earlier: dict[int, int] = field(factory=dict)


class SequenceStates:
    """States and checkpoints by sequence. A sequence goes back to its state before the last pass, to one that this has
    kept, or to a checkpoint.

    The lengths of sequences are given by the caller, in tokens.

    Args:
        max_bytes: maximum size of all checkpoints.
    """

    def __init__(self, pools: StatePools, max_bytes: int) -> None:
        self._pools = pools
        self._checkpoints = Checkpoints[State](max_bytes)
        self._rows: dict[int, _Rows] = {}

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence after each of which a pass can keep the state."""
        return self._pools.max_tokens

    def open(self, sequence: int) -> None:
        """Give a new sequence the empty state."""
        first = self._pools.first_row(sequence)
        self._rows[sequence] = _Rows(first)
        self._pools.clear(first)

    def free(self, sequence: int) -> None:
        """Forget a sequence."""
        del self._rows[sequence]
        self._checkpoints.free(sequence)

    def rows(self, sequences: Sequence[int], num_tokens: int = 1) -> NDArray[np.int32]:
        """(num_tokens + 1, len(sequences)), rows of a pass: a token, or a span, reads one and writes the next."""
        rows = np.arange(num_tokens + 1)[:, None] + [self._rows[sequence].current for sequence in sequences]
        firsts = np.array([self._pools.first_row(sequence) for sequence in sequences])
        circle: NDArray[np.int32] = firsts + (rows - firsts) % (1 + self._pools.max_tokens)
        return circle.astype(np.int32)

    def advance(self, sequence: int, before: int, num_kept: int = 1) -> None:
        """Record that a pass has appended tokens to a sequence of the length ``before``.

        Args:
            num_kept: number of the tokens if the pass has kept a state after each of them, else 1.
        """
        rows = self._rows[sequence]
        *earlier, rows.current = self.rows([sequence], num_kept)[:, 0].tolist()
        rows.earlier = dict(enumerate(earlier, before))

    def kept_length(self, sequence: int, length: int, num_held: int) -> int:
        """Return the longest length up to ``length`` whose state is known, of a sequence of ``num_held`` tokens."""
        if length >= num_held:
            return num_held
        known = (one for one in self._rows[sequence].earlier if one <= length)
        return max(self._checkpoints.last_length(sequence, length), *known, 0)

    def cut(self, sequence: int, kept: int, num_held: int) -> None:
        """Go back to a length that :meth:`kept_length` returned."""
        rows = self._rows[sequence]
        if kept < num_held:
            if kept in rows.earlier:
                rows.current = rows.earlier[kept]
            else:
                self._restore(sequence, kept, rows.current)
            rows.earlier = {}
        self._checkpoints.cut(sequence, kept)

    def fork(self, source: int, sequence: int, kept: int, num_held: int) -> None:
        """Give a new sequence the state of ``source`` at the length ``kept`` of ``num_held``, and its checkpoints."""
        rows, target = self._rows[source], _Rows(self._pools.first_row(sequence))
        if kept == num_held or kept in rows.earlier:
            self._pools.copy(rows.current if kept == num_held else rows.earlier[kept], target.current)
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
        first = self._pools.first_row(sequence)
        self._rows[sequence] = _Rows(first)
        self._pools.write(first, self._pools.joined(parts))
        for length in lengths:
            self._checkpoints.keep(sequence, length, self._pools.joined(parts), self._pools.bytes_per_state)

    def _restore(self, sequence: int, length: int, row: int) -> None:
        """Write the state of a sequence at a checkpoint, or at its beginning, to a row."""
        if length:
            self._pools.write(row, self._checkpoints.state(sequence, length))
        else:
            self._pools.clear(row)
