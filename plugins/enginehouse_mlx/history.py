"""Ways back of the sequences of a recurrent model: checkpoints of the states of all its layers.

Used by the runner. Keys and values have positions and are cut anywhere; for a model with keys and values only, nothing
is kept here, and every length can be gone back to.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.recurrent import States

__all__ = ["History"]


class History:
    """The states of all sequences and their checkpoints.

    Args:
        memory: memory of the sequences.
        max_checkpoints: maximum number of checkpoints over all sequences.
    """

    def __init__(self, memory: SlotMemory, max_checkpoints: int) -> None:
        self._layers = memory.states
        self._checkpoints = Checkpoints[Sequence[States]](max_checkpoints)  # all have the same size: they are counted

    def kept_length(self, sequence: int, held: int, length: int) -> int:
        """Return the length that can be gone back to from ``held`` tokens: at most ``length``."""
        if length >= held or not self._layers:
            return min(length, held)
        return self._checkpoints.last_length(sequence, length)

    def keep(self, sequence: int, length: int) -> None:
        """Keep a checkpoint at the current length of a sequence."""
        if self._layers and length and not self._checkpoints.has(sequence, length):
            self._checkpoints.keep(sequence, length, self._read(sequence), 1)

    def cut(self, sequence: int, held: int, length: int) -> None:
        """Go back from ``held`` tokens to a result of :meth:`kept_length`."""
        if length < held:
            self._write(sequence, self._checkpoints.state(sequence, length) if length and self._layers else None)
        self._checkpoints.cut(sequence, length)

    def share(self, source: int, held: int, sequence: int, length: int) -> None:
        """Begin a fork of a sequence of ``held`` tokens, with a result of :meth:`kept_length`."""
        if not self._layers:
            return
        if length == held:
            self._write(sequence, self._read(source) if length else None)
        else:
            self._write(sequence, self._checkpoints.state(source, length) if length else None)
        self._checkpoints.share(source, sequence, length)

    def free(self, sequence: int) -> None:
        """Drop the states and checkpoints of a sequence."""
        self._write(sequence, None)
        self._checkpoints.free(sequence)

    def saved(self, sequence: int, held: int) -> list[tuple[int, Sequence[States]]]:
        """Return the checkpoints to save of a sequence of ``held`` tokens, then its states with the length 0."""
        return [*self._checkpoints.saved(sequence, held), (0, self._read(sequence))] if self._layers else []

    def restore(self, sequence: int, saved: Sequence[tuple[int, Sequence[States]]]) -> None:
        """Set what :meth:`saved` returned for a new sequence."""
        for length, states in saved:
            if length:
                self._checkpoints.keep(sequence, length, states, 1)
            else:
                self._write(sequence, states)

    def _read(self, sequence: int) -> list[States]:
        states = [layer.read(sequence) for layer in self._layers]
        mx.eval([array for layer in states for array in layer if array is not None])
        return states

    def _write(self, sequence: int, states: Sequence[States] | None) -> None:
        for index, layer in enumerate(self._layers):
            layer.write(sequence, None if states is None else states[index])
