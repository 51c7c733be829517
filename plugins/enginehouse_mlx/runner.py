"""Runner over an mlx-lm model: spans of about equal length share a call of the model, others follow in the same step.

So all decoding sequences run as one batch, drafts of unequal length included, and prefill chunks one after the other.
It knows sequences, slots and logits; nothing of files (see ``loader.py``) or requests. Load, run and free it on one
thread: MLX streams belong to threads. ``abort`` has no effect, and the capabilities say so: MLX evaluates a step as a
whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from enginehouse.backend import Draw, ForwardOutput, LastSampled, RunnerCapabilities, Span, Tokenizer
from enginehouse.errors import EngineError, InvalidSpan
from enginehouse.slot_table import SlotTable, num_tokens
from enginehouse.types import ModelInfo
from enginehouse_mlx.cache import Batch, SlotMemory
from enginehouse_mlx.halves import ModelHalves
from enginehouse_mlx.sampling import MlxDrawn, sample
from enginehouse_mlx.tokenizer import ModelText

__all__ = ["DrawingRunner", "LogitsRows", "MlxRunner", "groups_of"]

_SHORT_TOKENS = 16
_UNKNOWN = np.zeros(1, np.int32)


class LogitsRows:
    """Rows of one forward pass; ``logits`` is (num_rows, vocab_size) float32."""

    def __init__(self, logits: mx.array) -> None:
        self.num_rows = int(logits.shape[0])
        self.logits = logits

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable: the memory of the MLX array itself."""
        return np.asarray(self.logits)

    def select(self, rows: Sequence[int]) -> LogitsRows:
        """Only these rows."""
        return LogitsRows(self.logits[mx.array(list(rows))])


class MlxRunner:
    """Implements :class:`enginehouse.backend.Runner`; a sequence is a slot of :class:`SlotMemory`."""

    def __init__(
        self,
        halves: ModelHalves,
        memory: SlotMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
    ) -> None:
        self.capabilities = capabilities
        self.tokenizer: Tokenizer = text.tokenizer
        self.info = info
        self._halves: Any = halves
        self._memory: Any = memory
        self._table = SlotTable(capabilities, info.vocab_size)

    def open_sequence(self) -> int:
        """A new, empty sequence."""
        return self._table.open()

    def free_sequence(self, sequence: int) -> None:
        """Give the slot back."""
        self._table.free(sequence)

    def length(self, sequence: int) -> int:
        """Tokens that the sequence holds."""
        return self._table.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Sliding-window layers keep every position, so any length is exact."""
        return self._table.truncate(sequence, length)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Copy the first ``length`` positions into a new slot."""
        sequence, kept = self._table.fork(source, length)
        self._memory.copy(source, sequence, kept)
        return sequence, kept

    def free_tokens(self) -> int:
        """Positions that no sequence holds."""
        return self._table.free_tokens()

    def forward(self, spans: Sequence[Span]) -> LogitsRows:
        """Append all spans; failed, no sequence has grown."""
        self._table.check(spans)
        try:
            logits = self._logits(spans)
            mx.eval(logits, self._memory.arrays)
        except RuntimeError as error:  # what MLX raises, out of memory included
            raise EngineError(f"mlx: the forward pass failed: {error}") from error
        self._table.advance(spans)
        return LogitsRows(logits)

    def abort(self) -> None:
        """No effect: MLX evaluates a step as a whole."""

    def close(self) -> None:
        """Drop weights and KV memory; again is no error."""
        self._halves = self._memory = None
        mx.clear_cache()

    def _logits(self, spans: Sequence[Span]) -> mx.array:
        """(num_rows, vocab_size) float32 of checked spans, not yet evaluated."""
        hidden: dict[int, mx.array] = {}
        sizes = [num_tokens(span) for span in spans]
        for group in groups_of(sizes) if self._halves.can_batch else [[i] for i in range(len(spans))]:
            hidden |= self._run([spans[i] for i in group], group)
        wanted = [rows for _, rows in sorted(hidden.items()) if len(rows)]
        width = self.info.vocab_size
        logits = self._halves.head(mx.concatenate(wanted)) if wanted else mx.zeros((0, width))
        return logits.astype(mx.float32)

    def _run(self, spans: Sequence[Span], indices: Sequence[int]) -> dict[int, mx.array]:
        """Call the model on a group of spans; the wanted rows (num_rows, width) by index.

        Shorter spans are filled up behind their end. What is computed there is dropped; the positions lie beyond the
        sequence's length, so nobody sees them before they are written again.
        """
        sizes = [num_tokens(span) for span in spans]
        batch = Batch(tuple(s.sequence for s in spans), tuple(s.start for s in spans), max(sizes))
        token_ids = np.zeros((len(spans), batch.num_tokens), np.int32)
        for row, span in enumerate(spans):
            token_ids[row, : sizes[row]] = span.input
        output = self._halves.body(self._inputs(mx.array(token_ids), spans), self._memory.begin(batch))
        rows = {}
        for row, (index, span, size) in enumerate(zip(indices, spans, sizes, strict=True)):
            first = {"none": size, "last": size - 1, "all": 0}[span.outputs]
            rows[index] = output[row, first:size]
        return rows

    def _inputs(self, token_ids: mx.array, _spans: Sequence[Span]) -> mx.array:
        """(num_spans, num_tokens) int32, what the model is called with."""
        return token_ids


class DrawingRunner(MlxRunner):
    """Also draws the tokens, with MLX; implements :class:`enginehouse.backend.DeviceSampler`.

    A pass is built and begun, but not waited for: the next one can be built before its tokens are read.
    """

    def __init__(
        self,
        halves: ModelHalves,
        memory: SlotMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
    ) -> None:
        super().__init__(halves, memory, capabilities, text, info)
        self._last = mx.zeros((capabilities.max_sequences,), mx.int32)
        self._drawn: set[int] = set()

    def free_sequence(self, sequence: int) -> None:
        """Give the slot back; what was drawn for it is forgotten."""
        super().free_sequence(sequence)
        self._drawn.discard(sequence)

    def forward(self, spans: Sequence[Span]) -> LogitsRows:
        """Build one pass over all spans and begin it; failed, no sequence has grown."""
        known = [self._with_size(span) for span in spans]
        self._table.check(known)
        try:
            logits = self._logits(known)
            mx.async_eval(logits, self._memory.arrays)
        except RuntimeError as error:
            raise EngineError(f"mlx: the forward pass failed: {error}") from error
        self._table.advance(known)
        return LogitsRows(logits)

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> MlxDrawn:
        """Begin the draws; see :class:`enginehouse.backend.DeviceSampler`."""
        assert isinstance(output, LogitsRows)
        drawn = sample(output.logits, draws)
        slots = [draw.sequence for draw in draws]
        self._last[mx.array(slots)] = mx.maximum(drawn.arrays[0], 0)
        self._drawn.update(slots)
        mx.async_eval(*drawn.arrays, self._last)
        return drawn

    def _inputs(self, token_ids: mx.array, spans: Sequence[Span]) -> mx.array:
        """(num_spans, num_tokens) int32, with the tokens that are still being drawn."""
        late = [row for row, span in enumerate(spans) if span.input is _UNKNOWN]
        if late:
            token_ids[mx.array(late), 0] = self._last[mx.array([spans[row].sequence for row in late])]
        return token_ids

    def _with_size(self, span: Span) -> Span:
        """The span with any token in the place of one that is still being drawn."""
        if not isinstance(span.input, LastSampled):
            return span
        if span.sequence not in self._drawn:
            raise InvalidSpan(f"sequence {span.sequence}: no token was drawn for it")
        return evolve(span, input=_UNKNOWN)


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """Which spans share a call of the model, by index.

    Short ones (single tokens, drafts) share one and are filled up to the longest, unless more than half of what it
    computes were filling; all others need the same size.
    """
    short = [i for i, size in enumerate(sizes) if size <= _SHORT_TOKENS]
    is_worth_it = len(short) * max((sizes[i] for i in short), default=0) <= 2 * sum(sizes[i] for i in short)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        groups[0 if size <= _SHORT_TOKENS and is_worth_it else size].append(i)
    return list(groups.values())
