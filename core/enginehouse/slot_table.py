"""Bookkeeping for runners in which every sequence owns one slot: handles, lengths, room, valid spans.

For backend authors: a runner asks the table before it touches its KV memory and tells it afterwards what
grew. The table holds no tensors, knows no library, and runs on the runner's thread.

Invariant: ``free_tokens() + sum of all lengths == capabilities.cache_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginehouse.backend import LastSampled, RunnerCapabilities, Span
from enginehouse.errors import CacheFull, InvalidSpan

__all__ = ["SlotTable", "num_tokens"]


class SlotTable:
    """Open sequences and their lengths. A handle is the number of its slot, ``0 <= handle < max_sequences``."""

    def __init__(self, capabilities: RunnerCapabilities, vocab_size: int) -> None:
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._lengths: dict[int, int] = {}

    @property
    def open_sequences(self) -> tuple[int, ...]:
        """Handles now open."""
        return tuple(self._lengths)

    def open(self) -> int:
        """A new, empty sequence in the lowest free slot, which keeps touched memory small.

        Raises:
            CacheFull: ``max_sequences`` are open.
        """
        for slot in range(self._capabilities.max_sequences):
            if slot not in self._lengths:
                self._lengths[slot] = 0
                return slot
        raise CacheFull(1, 0)

    def free(self, sequence: int) -> None:
        """Close the sequence; its slot and positions can be used again."""
        self.length(sequence)
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        """Number of tokens that the sequence holds. Raises InvalidSpan when it is not open."""
        try:
            return self._lengths[sequence]
        except KeyError:
            raise InvalidSpan(f"sequence {sequence} is not open") from None

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most the first ``length`` tokens; returns the length kept."""
        kept = min(self.length(sequence), _checked_length(length))
        self._lengths[sequence] = kept
        return kept

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that will hold the first ``length`` tokens of ``source``; the caller copies them.

        Returns:
            The new handle and its length (less than asked when the source is shorter).

        Raises:
            CacheFull: no slot or no positions left; nothing was changed.
        """
        kept = min(self.length(source), _checked_length(length))
        if kept > self.free_tokens():
            raise CacheFull(kept, self.free_tokens())
        sequence = self.open()
        self._lengths[sequence] = kept
        return sequence, kept

    def free_tokens(self) -> int:
        """KV positions that no sequence holds."""
        return self._capabilities.cache_tokens - sum(self._lengths.values())

    def check(self, spans: Sequence[Span]) -> None:
        """Find out whether the batch may run; nothing is changed.

        Raises:
            InvalidSpan: a span breaks the runner's contract.
            CacheFull: there are fewer free positions than tokens.
        """
        if not spans:
            raise InvalidSpan("a batch needs at least one span")
        if len({span.sequence for span in spans}) != len(spans):
            raise InvalidSpan("a sequence has more than one span in the batch")
        needed = sum(self._checked_size(span) for span in spans)
        if needed > self._capabilities.max_batch_tokens:
            raise InvalidSpan(f"the batch has {needed} tokens; at most {self._capabilities.max_batch_tokens} fit")
        if needed > self.free_tokens():
            raise CacheFull(needed, self.free_tokens())

    def advance(self, spans: Sequence[Span]) -> None:
        """Record that every span was appended to its sequence."""
        for span in spans:
            self._lengths[span.sequence] += num_tokens(span)

    def _checked_size(self, span: Span) -> int:
        length = self.length(span.sequence)
        if span.start != length:
            raise InvalidSpan(f"sequence {span.sequence}: start is {span.start} but its length is {length}")
        if span.num_layers is not None and span.num_layers not in self._capabilities.exit_layers:
            raise InvalidSpan(f"sequence {span.sequence}: num_layers={span.num_layers} is not supported")
        if span.outputs not in ("none", "last", "all"):
            raise InvalidSpan(f"sequence {span.sequence}: outputs={span.outputs!r} is unknown")
        size = num_tokens(span)
        if length + size > self._capabilities.max_context:
            raise InvalidSpan(
                f"sequence {span.sequence}: {length} + {size} tokens exceed the context of "
                f"{self._capabilities.max_context}"
            )
        token_ids = span.input
        assert not isinstance(token_ids, LastSampled)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self._vocab_size:
            raise InvalidSpan(f"sequence {span.sequence}: a token id is outside the vocabulary of {self._vocab_size}")
        return size


def num_tokens(span: Span) -> int:
    """Number of tokens of a span given as ids; raises InvalidSpan for anything else."""
    token_ids = span.input
    if isinstance(token_ids, LastSampled):
        raise InvalidSpan(f"sequence {span.sequence}: this runner needs token ids")
    if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer) or token_ids.size == 0:
        raise InvalidSpan(f"sequence {span.sequence}: the input must be a non-empty row of token ids")
    return int(token_ids.size)


def _checked_length(length: int) -> int:
    if length < 0:
        raise InvalidSpan(f"a length must not be negative, got {length}")
    return length
