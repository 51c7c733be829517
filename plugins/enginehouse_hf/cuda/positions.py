"""The host's account of the pool: which place each position of each sequence has, and how many sequences share it.

A place holds keys and values of one token in every layer. Sequences that share a beginning share its places, so a
fork copies nothing; what is appended always gets a place of its own. Called by the runner, knows no tensors.

Invariant: ``free_tokens() + number of places that some sequence holds == capabilities.cache_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.backend import LastSampled, RunnerCapabilities, Span
from enginehouse.errors import CacheFull, InvalidSpan

__all__ = ["PositionPool"]

_OUTPUTS = ("none", "last", "all")


class PositionPool:
    """Open sequences and their places. A handle is a row of ``table``, ``0 <= handle < max_sequences``.

    Attributes:
        table: (max_sequences, max_context) int32, the place of every position.
    """

    def __init__(self, capabilities: RunnerCapabilities, vocab_size: int) -> None:
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self.table: NDArray[np.int32] = np.zeros((capabilities.max_sequences, capabilities.max_context), np.int32)
        self._lengths: dict[int, int] = {}
        self._closed = list(range(capabilities.max_sequences - 1, -1, -1))
        self._owners = np.zeros(capabilities.cache_tokens, np.int32)
        # A stack whose top is at the end, the lowest places first: neighbours in time become neighbours in memory.
        self._free: NDArray[np.int32] = np.arange(capabilities.cache_tokens - 1, -1, -1, dtype=np.int32)
        self._num_free = capabilities.cache_tokens

    def open(self) -> int:
        """A new, empty sequence. Raises CacheFull when ``max_sequences`` are open."""
        if not self._closed:
            raise CacheFull(1, 0)
        slot = self._closed.pop()
        self._lengths[slot] = 0
        return slot

    def free(self, sequence: int) -> None:
        """Close the sequence and give back the places that nobody shares."""
        self._release(sequence, 0)
        del self._lengths[sequence]
        self._closed.append(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens that the sequence holds. Raises InvalidSpan when it is not open."""
        try:
            return self._lengths[sequence]
        except KeyError:
            raise InvalidSpan(f"sequence {sequence} is not open") from None

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most the first ``length`` tokens; returns the length kept."""
        kept = min(self.length(sequence), _checked_length(length))
        self._release(sequence, kept)
        self._lengths[sequence] = kept
        return kept

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that shares the first ``length`` places of ``source``: its handle and length."""
        kept = min(self.length(source), _checked_length(length))
        sequence = self.open()
        places = self.table[source, :kept]
        self.table[sequence, :kept] = places
        self._owners[places] += 1
        self._lengths[sequence] = kept
        return sequence, kept

    def free_tokens(self) -> int:
        """Places that no sequence holds."""
        return self._num_free

    def check(self, spans: Sequence[Span]) -> list[int]:
        """Find out whether the batch may run; nothing is changed.

        Returns:
            The number of tokens of each span.

        Raises:
            InvalidSpan: a span breaks the runner's contract.
            CacheFull: there are fewer free places than tokens.
        """
        if not spans:
            raise InvalidSpan("a batch needs at least one span")
        if len({span.sequence for span in spans}) != len(spans):
            raise InvalidSpan("a sequence has more than one span in the batch")
        sizes = [self._checked_size(span) for span in spans]
        needed = sum(sizes)
        if needed > self._capabilities.max_batch_tokens:
            raise InvalidSpan(f"the batch has {needed} tokens; at most {self._capabilities.max_batch_tokens} fit")
        if needed > self._num_free:
            raise CacheFull(needed, self._num_free)
        return sizes

    def append(self, spans: Sequence[Span], sizes: Sequence[int]) -> NDArray[np.int32]:
        """Give every new token of checked spans a place; (num_tokens,) int32, span by span."""
        total = sum(sizes)
        places = self._free[self._num_free - total : self._num_free][::-1].copy()
        self._num_free -= total
        self._owners[places] = 1
        if total == len(spans):  # one token each, as in nearly every step
            self.table[[span.sequence for span in spans], [span.start for span in spans]] = places
        else:
            begin = 0
            for span, size in zip(spans, sizes, strict=True):
                self.table[span.sequence, span.start : span.start + size] = places[begin : begin + size]
                begin += size
        for span, size in zip(spans, sizes, strict=True):
            self._lengths[span.sequence] = span.start + size
        return places

    def _release(self, sequence: int, kept: int) -> None:
        places = self.table[sequence, kept : self.length(sequence)]
        owners = self._owners[places] - 1  # a sequence holds no place twice
        self._owners[places] = owners
        orphaned = places[owners == 0][::-1]
        self._free[self._num_free : self._num_free + len(orphaned)] = orphaned
        self._num_free += len(orphaned)

    def _checked_size(self, span: Span) -> int:
        length = self.length(span.sequence)
        if span.start != length:
            raise InvalidSpan(f"sequence {span.sequence}: start is {span.start} but its length is {length}")
        if span.num_layers is not None:
            raise InvalidSpan(f"sequence {span.sequence}: num_layers={span.num_layers} is not supported")
        if span.outputs not in _OUTPUTS:
            raise InvalidSpan(f"sequence {span.sequence}: outputs={span.outputs!r} is unknown")
        size = 1 if isinstance(span.input, LastSampled) else self._checked_ids(span.sequence, span.input)
        if length + size > self._capabilities.max_context:
            raise InvalidSpan(
                f"sequence {span.sequence}: {length} + {size} tokens exceed the context of "
                f"{self._capabilities.max_context}"
            )
        return size

    def _checked_ids(self, sequence: int, token_ids: NDArray[np.int32]) -> int:
        if token_ids.ndim != 1 or token_ids.dtype.kind != "i" or not token_ids.size:
            raise InvalidSpan(f"sequence {sequence}: the input must be a non-empty row of token ids")
        if token_ids.size == 1:
            low = high = int(token_ids[0])
        else:
            low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._vocab_size:
            raise InvalidSpan(f"sequence {sequence}: a token id is outside the vocabulary of {self._vocab_size}")
        return int(token_ids.size)


def _checked_length(length: int) -> int:
    if length < 0:
        raise InvalidSpan(f"a length must not be negative, got {length}")
    return length
