"""States of recurrent layers (state space, gated delta net, short convolution), passed to mlx-lm's models as caches.

Such a layer reads its states, (num_rows, ...) each, and replaces them; they have no positions. :class:`StateCache`
gives it those of the sequences of the current batch. While the same sequences decode, the arrays of the last call are
passed on as they are; when the batch changes, each sequence gets a copy of its own row. Arrays are never changed once
they are stored, so that forks and checkpoints share them.

Source: the attributes that mlx-lm's models use of its ``ArraysCache`` (mlx_lm/models/cache.py). Padding is not used:
the spans of a call have equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from enginehouse_mlx.batch import Batch

__all__ = ["Form", "StateCache", "States"]

Form = tuple[tuple[int, ...], mx.Dtype]
"""Shape and type of an array."""

States = tuple[mx.array | None, ...]
"""States of one sequence in one layer, (1, ...) each; None where the layer keeps nothing."""


class StateCache:
    """Cache interface of one recurrent layer.

    Attributes:
        lengths, left_padding: None: no row is padded.
        forms: form of each state of one sequence; None until the layer has set it.
        parked: copies of rows made since the pass began, which may not be evaluated yet.
    """

    lengths = None
    left_padding = None

    def __init__(self, size: int) -> None:
        self.forms: list[Form | None] = [None] * size
        self.parked: list[mx.array] = []
        self._slots: tuple[int, ...] = ()  # those of the rows of ``_current``
        self._current: list[mx.array | None] = [None] * size
        self._others: dict[int, States] = {}

    def __getitem__(self, index: int) -> mx.array | None:
        return self._current[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._current[index] = value
        if value is not None and self.forms[index] is None:
            self.forms[index] = (1, *value.shape[1:]), value.dtype

    def __bool__(self) -> bool:
        return True

    def advance(self, num_tokens: int) -> None:
        """Do nothing: rows have no padding to be counted down."""

    def make_mask(self, num_tokens: int, **_: Any) -> None:
        """Return None: no token of a row is padding."""

    def empty(self) -> bool:
        """Return True if no row has states."""
        return self._current[0] is None

    @property
    def arrays(self) -> list[mx.array]:
        """States that the current pass has made, to be evaluated."""
        return [*self.parked, *(array for array in self._current if array is not None)]

    def begin_pass(self) -> Callable[[], None]:
        """Return a function that restores all states, for a pass that fails."""
        self.parked = []
        before = self._slots, list(self._current), dict(self._others)

        def undo() -> None:
            self._slots, self._current, self._others = before

        return undo

    def begin(self, batch: Batch) -> None:
        """Select the rows of a call; sequences that begin in it have no states."""
        if batch.slots == self._slots and all(batch.starts):
            return
        self._park()
        nothing = (None,) * len(self.forms)
        held = [self._others.pop(slot, nothing) for slot in batch.slots]
        rows = [states if start else nothing for states, start in zip(held, batch.starts, strict=True)]
        self._current = [_joined([row[index] for row in rows]) for index in range(len(nothing))]
        self._slots = batch.slots

    def read(self, slot: int) -> States:
        """Return the states of a sequence; they may not be evaluated yet."""
        self._leave(slot)
        return self._others.get(slot, (None,) * len(self.forms))

    def write(self, slot: int, states: States | None) -> None:
        """Replace the states of a sequence; None: it is empty."""
        self._leave(slot)
        self._others.pop(slot, None)
        if states is not None:
            self._others[slot] = states

    def _leave(self, slot: int) -> None:
        """End the batch of the last call if a sequence is in it, and compute the copies, which need the whole batch."""
        if slot in self._slots:
            self._park()
            mx.async_eval(self.parked)

    def _park(self) -> None:
        """Give each sequence of the last call its own arrays, so that none keeps those of the others alive."""
        for row, slot in enumerate(self._slots):
            states = tuple(None if a is None else mx.contiguous(a[row : row + 1]) for a in self._current)
            self._others[slot] = states
            self.parked += [array for array in states if array is not None]
        self._slots, self._current = (), [None] * len(self.forms)


def _joined(rows: Sequence[mx.array | None]) -> mx.array | None:
    """Return (num_rows, ...) of (1, ...) each; zeros for rows without a state. None if there is none."""
    known = next((row for row in rows if row is not None), None)
    if known is None or len(rows) == 1:
        return known
    empty = mx.zeros_like(known)
    return mx.concatenate([empty if row is None else row for row in rows])
