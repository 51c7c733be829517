"""Checkpoints of sequences: copies of their states by length, within a limit of memory.

For backend authors: a :class:`enginehouse.contract.checkpoints.CheckpointKeeper` keeps the states of its recurrent
layers here. Knows lengths and sizes; what a state is, the runner decides. A state must not change once it is kept, as
sequences that share a beginning share its checkpoints. Used on the runner's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

from attrs import define, field

from enginehouse.contract.checkpoints import NUM_SAVED_CHECKPOINTS

__all__ = ["Checkpoints"]

_State = TypeVar("_State")


@define(eq=False)
class _Checkpoint(Generic[_State]):
    length: int
    state: _State
    num_bytes: int
    owners: set[int] = field(factory=set)


class Checkpoints(Generic[_State]):
    """The checkpoints of all sequences of a runner; the least recently used ones are dropped first.

    Args:
        max_bytes: maximum size of all states together; with less than the size of one, none is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_use: dict[_Checkpoint[_State], None] = {}  # the least recently used one first
        self._of: dict[int, list[_Checkpoint[_State]]] = {}  # of each sequence, by length

    @property
    def num_bytes(self) -> int:
        """Size of all states; those of several sequences count once."""
        return self._num_bytes

    def has(self, sequence: int, length: int) -> bool:
        """Return True if the sequence has a checkpoint at ``length``, which is then the most recently used one."""
        found = self._at(sequence, length)
        if found is not None:
            self._touch(found)
        return found is not None

    def keep(self, sequence: int, length: int, state: _State, num_bytes: int) -> None:
        """Add a checkpoint; ask :meth:`has` before the state is copied."""
        if num_bytes > self._max_bytes:
            return
        while self._num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_use)))
        checkpoint = _Checkpoint(length, state, num_bytes, {sequence})
        own = self._of.setdefault(sequence, [])
        own.insert(bisect_right(own, length, key=lambda one: one.length), checkpoint)
        self._by_use[checkpoint] = None
        self._num_bytes += num_bytes

    def last_length(self, sequence: int, length: int) -> int:
        """Return the length of the last checkpoint of the sequence at or before ``length``; 0 if there is none."""
        own = self._of.get(sequence, [])
        index = bisect_right(own, length, key=lambda one: one.length)
        return own[index - 1].length if index else 0

    def state(self, sequence: int, length: int) -> _State:
        """Return the state of the checkpoint at exactly ``length``. Raises KeyError if there is none."""
        found = self._at(sequence, length)
        if found is None:
            raise KeyError(f"sequence {sequence} has no checkpoint at {length}")
        self._touch(found)
        return found.state

    def all(self, sequence: int) -> Sequence[tuple[int, _State]]:
        """Return the lengths and states of a sequence, by length."""
        return [(one.length, one.state) for one in self._of.get(sequence, ())]

    def saved(self, sequence: int, length: int) -> Sequence[tuple[int, _State]]:
        """Return the lengths and states to save with a sequence of ``length`` tokens, by length.

        One at its end is not saved: it is the state of the sequence itself.
        """
        return [one for one in self.all(sequence) if one[0] < length][-NUM_SAVED_CHECKPOINTS:]

    def cut(self, sequence: int, length: int) -> None:
        """Drop the checkpoints of a sequence beyond ``length``."""
        own = self._of.get(sequence, [])
        while own and own[-1].length > length:
            self._leave(own.pop(), sequence)
        if not own:
            self._of.pop(sequence, None)

    def share(self, source: int, target: int, length: int) -> None:
        """Give ``target``, a new sequence, the checkpoints of ``source`` up to ``length``."""
        shared = [one for one in self._of.get(source, ()) if one.length <= length]
        for one in shared:
            one.owners.add(target)
        if shared:
            self._of[target] = shared

    def free(self, sequence: int) -> None:
        """Drop all checkpoints of a sequence."""
        self.cut(sequence, -1)

    def clear(self) -> None:
        """Drop all checkpoints."""
        self._by_use.clear()
        self._of.clear()
        self._num_bytes = 0

    def _at(self, sequence: int, length: int) -> _Checkpoint[_State] | None:
        return next((one for one in self._of.get(sequence, ()) if one.length == length), None)

    def _touch(self, checkpoint: _Checkpoint[_State]) -> None:
        del self._by_use[checkpoint]
        self._by_use[checkpoint] = None

    def _leave(self, checkpoint: _Checkpoint[_State], sequence: int) -> None:
        """End the use of a checkpoint by a sequence; it is gone with its last one."""
        checkpoint.owners.discard(sequence)
        if not checkpoint.owners:
            del self._by_use[checkpoint]
            self._num_bytes -= checkpoint.num_bytes

    def _drop(self, checkpoint: _Checkpoint[_State]) -> None:
        """Take a checkpoint from all its sequences."""
        for sequence in list(checkpoint.owners):
            own = self._of[sequence]
            own.remove(checkpoint)
            if not own:
                del self._of[sequence]
            self._leave(checkpoint, sequence)
