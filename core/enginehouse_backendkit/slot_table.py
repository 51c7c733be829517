"""Bookkeeping for runners: handles, lengths, free positions, span validation.

For backend authors: a runner asks its table before it changes its KV memory and records afterwards what grew.
:class:`SlotTable` is for runners in which every sequence owns one slot; runners that share positions between sequences
build on :class:`SequenceTable`. Tables hold no tensors, know no library, and run on the runner's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import LastSampled, RunnerCapabilities, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan, StateRefused
from enginehouse.contract.media import MediaInput

__all__ = ["SequenceTable", "SlotTable", "checked_length", "num_tokens"]

_OUTPUTS = ("none", "last", "all")


class SequenceTable(ABC):
    """Open sequences, their lengths, and validation of the spans to append to them.

    Positions that a span computed with ``num_layers`` have no keys and values in the layers above. Until they are
    truncated, spans with more layers are refused on their sequence: values that were never written are never read.

    Attributes:
        takes_sampled: True if :class:`enginehouse.contract.backend.LastSampled` is accepted as the input of a span.
    """

    takes_sampled = False

    def __init__(self, capabilities: RunnerCapabilities, vocab_size: int) -> None:
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._lengths: dict[int, int] = {}
        self._shallow: dict[int, list[tuple[int, int]]] = {}
        """Start and number of layers of spans with fewer layers, per sequence; starts ascending, layers descending."""

    def length(self, sequence: int) -> int:
        """Return the number of tokens in the sequence. Raises InvalidSpan if it is not open."""
        try:
            return self._lengths[sequence]
        except KeyError:
            raise InvalidSpan(f"sequence {sequence} is not open") from None

    @abstractmethod
    def free_tokens(self) -> int:
        """Return the number of free KV positions."""

    def check(self, spans: Sequence[Span]) -> list[int]:
        """Validate a batch; nothing is changed.

        Returns:
            The number of tokens of each span.

        Raises:
            InvalidSpan: a span violates the runner's contract.
            CacheFull: there are fewer free positions than tokens.
        """
        if not spans:
            raise InvalidSpan("a batch needs at least one span")
        if len({span.sequence for span in spans}) != len(spans):
            raise InvalidSpan("a sequence has more than one span in the batch")
        sizes = [self._checked_size(span) for span in spans]
        needed = sum(sizes)
        has_chunk = any(isinstance(span.input, MediaInput) for span in spans)
        if has_chunk and len(spans) > 1:
            raise InvalidSpan("a pass with a media chunk has no other span")
        if not has_chunk and needed > self._capabilities.max_batch_tokens:
            raise InvalidSpan(f"the batch has {needed} tokens; at most {self._capabilities.max_batch_tokens} fit")
        if needed > self.free_tokens():
            raise CacheFull(needed, self.free_tokens())
        return sizes

    def saved_length(self, sequence: int) -> int:
        """Return the length of a sequence to be saved. Raises InvalidSpan if it is incomplete or empty."""
        if sequence in self._shallow:
            raise InvalidSpan(f"sequence {sequence} holds positions that only some layers have seen")
        if not (length := self.length(sequence)):
            raise InvalidSpan(f"sequence {sequence} holds nothing that could be saved")
        return length

    def _check_adopted(self, num_tokens: int) -> None:
        """Raise as :meth:`enginehouse.contract.backend.StateKeeper.load` if ``num_tokens`` tokens do not fit."""
        longest = self._capabilities.max_context
        if num_tokens > longest:
            raise StateRefused(f"the sequence has {num_tokens} tokens, and the context is {longest}")
        if num_tokens > self.free_tokens():
            raise CacheFull(num_tokens, self.free_tokens())

    def _grow(self, spans: Sequence[Span], sizes: Sequence[int]) -> None:
        """Record that every span was appended to its sequence."""
        for span, size in zip(spans, sizes, strict=True):
            self._lengths[span.sequence] = span.start + size
            if span.num_layers is not None:
                self._shallow.setdefault(span.sequence, []).append((span.start, span.num_layers))

    def _shorten(self, sequence: int, length: int) -> None:
        """Record that only the first ``length`` tokens remain."""
        self._lengths[sequence] = length
        if sequence in self._shallow:
            self._inherit(sequence, sequence, length)

    def _inherit(self, source: int, sequence: int, length: int) -> None:
        """Copy the entries of ``_shallow`` for the first ``length`` positions of ``source`` to ``sequence``."""
        kept = [entry for entry in self._shallow.get(source, ()) if entry[0] < length]
        if kept:
            self._shallow[sequence] = kept
        else:
            self._shallow.pop(sequence, None)

    def _checked_size(self, span: Span) -> int:
        sequence, token_ids = span.sequence, span.input
        length = self.length(sequence)
        if span.start != length:
            raise InvalidSpan(f"sequence {sequence}: start is {span.start} but its length is {length}")
        if span.num_layers is not None or self._shallow:
            self._check_layers(sequence, span.num_layers)
        if span.outputs not in _OUTPUTS:
            raise InvalidSpan(f"sequence {sequence}: outputs={span.outputs!r} is unknown")
        if isinstance(token_ids, LastSampled):
            if not self.takes_sampled:
                raise InvalidSpan(f"sequence {sequence}: this runner needs token ids")
            size = 1
        elif isinstance(token_ids, MediaInput):
            size = self._checked_chunk(span, token_ids)
        else:
            size = self._checked_ids(sequence, token_ids)
        if length + size > self._capabilities.max_context:
            raise InvalidSpan(
                f"sequence {sequence}: {length} + {size} tokens exceed the context of {self._capabilities.max_context}"
            )
        return size

    def _checked_chunk(self, span: Span, media: MediaInput) -> int:
        if media.chunk.kind not in self._capabilities.media:
            raise InvalidSpan(f"sequence {span.sequence}: this runner needs token ids, not {media.chunk.kind}")
        if span.outputs != "none":
            raise InvalidSpan(f"sequence {span.sequence}: {media.chunk.kind} gives no logits, so outputs must be none")
        return media.chunk.num_tokens

    def _check_layers(self, sequence: int, num_layers: int | None) -> None:
        if num_layers is not None and num_layers not in self._capabilities.exit_layers:
            raise InvalidSpan(f"sequence {sequence}: num_layers={num_layers} is not supported")
        if entries := self._shallow.get(sequence):
            deepest = entries[-1][1]
            if num_layers is None or num_layers > deepest:
                raise InvalidSpan(
                    f"sequence {sequence}: positions from {entries[0][0]} on ran fewer layers than this span asks for; "
                    "truncate them away first"
                )

    def _checked_ids(self, sequence: int, token_ids: NDArray[np.int32]) -> int:
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu" or not token_ids.size:
            raise InvalidSpan(f"sequence {sequence}: the input must be a non-empty row of token ids")
        if token_ids.size == 1:  # the case of nearly every step
            low = high = int(token_ids[0])
        else:
            low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._vocab_size:
            raise InvalidSpan(f"sequence {sequence}: a token id is outside the vocabulary of {self._vocab_size}")
        return int(token_ids.size)


class SlotTable(SequenceTable):
    """A table in which a handle is the number of its slot, ``0 <= handle < max_sequences``.

    Invariant: ``free_tokens() + sum of all lengths == capabilities.cache_tokens``.
    """

    def open(self) -> int:
        """Open an empty sequence in the lowest free slot, which keeps the touched memory small.

        Raises:
            CacheFull: ``max_sequences`` are open.
        """
        for slot in range(self._capabilities.max_sequences):
            if slot not in self._lengths:
                self._lengths[slot] = 0
                return slot
        raise CacheFull(1, 0)

    def free(self, sequence: int) -> None:
        """Close the sequence; its slot and positions can be reused."""
        self.length(sequence)
        self._shorten(sequence, 0)
        del self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> int:
        """Keep at most the first ``length`` tokens. Returns the new length."""
        kept = min(self.length(sequence), checked_length(length))
        self._shorten(sequence, kept)
        return kept

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Open a sequence that will hold the first ``length`` tokens of ``source``; the caller copies them.

        Returns:
            The new handle and its length (less than ``length`` if the source is shorter).

        Raises:
            CacheFull: no free slot or not enough free positions; nothing was changed.
        """
        kept = min(self.length(source), checked_length(length))
        if kept > self.free_tokens():
            raise CacheFull(kept, self.free_tokens())
        sequence = self.open()
        self._lengths[sequence] = kept
        self._inherit(source, sequence, kept)
        return sequence, kept

    def adopt(self, num_tokens: int) -> int:
        """Open a sequence of ``num_tokens`` tokens, whose positions the caller fills with saved data.

        Raises:
            StateRefused: it is longer than the context.
            CacheFull: no free slot or not enough free positions; nothing was changed.
        """
        self._check_adopted(num_tokens)
        sequence = self.open()
        self._lengths[sequence] = num_tokens
        return sequence

    def free_tokens(self) -> int:
        """Return the number of free KV positions."""
        return self._capabilities.cache_tokens - sum(self._lengths.values())

    def advance(self, spans: Sequence[Span]) -> None:
        """Record that every span was appended to its sequence."""
        self._grow(spans, [num_tokens(span) for span in spans])


def num_tokens(span: Span) -> int:
    """Return the number of tokens of a span. Raises InvalidSpan if its input is :class:`LastSampled`."""
    if isinstance(span.input, LastSampled):
        raise InvalidSpan(f"sequence {span.sequence}: this runner needs token ids")
    return span.num_tokens


def checked_length(length: int) -> int:
    """Return ``length``. Raises InvalidSpan if it is negative."""
    if length < 0:
        raise InvalidSpan(f"a length must not be negative, got {length}")
    return length
