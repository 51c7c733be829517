"""Contract of runners whose sequences go back to checkpoints: those of recurrent and hybrid models."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from enginehouse.contract.backend import CutPlanner

__all__ = ["NUM_SAVED_CHECKPOINTS", "CheckpointKeeper"]

NUM_SAVED_CHECKPOINTS = 4
"""Checkpoints that are saved with a sequence: the last ones before its end. A state may be as large as many tokens."""


@runtime_checkable
class CheckpointKeeper(CutPlanner, Protocol):
    """A runner with ``checkpoint`` truncation: its sequences carry a state from which no token can be removed.

    Such is the state of a recurrent layer, which hybrid models have beside layers with keys and values. A *checkpoint*
    is a copy of the state of a sequence at a length. ``truncate``, ``fork`` and ``kept_length`` keep the requested
    length if the sequence ends or has a checkpoint there, else that of its last checkpoint before it, else 0. A fork
    has the checkpoints of its source up to its length; a truncation drops those beyond the kept length and keeps the
    one that it went back to. A runner that can go back in another way too, say by its last token, may keep more:
    with a draft head it keeps what :class:`enginehouse.contract.drafter.HeadKeeper` says.

    The runner limits the memory of all checkpoints and drops the least recently used ones first (``Checkpoints`` of
    ``enginehouse_backendkit`` does so); they take no KV positions. The contract suite needs room for eight.

    Calls:
        keep_checkpoint: at the boundaries of messages, at regular distances, and where a cached prefix ends; worker,
            engine thread; milliseconds.
    """

    def keep_checkpoint(self, sequence: int) -> None:
        """Keep a checkpoint at the current length of the sequence, which is not changed.

        Called between passes; does nothing if there is one at this length, or if the sequence is empty.
        """
