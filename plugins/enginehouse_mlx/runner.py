"""Runner over an mlx-lm model: spans of equal length share a call of the model, others follow in the same step.

So all decoding sequences run as one batch, and prefill chunks one after the other. It knows sequences,
slots and logits; nothing of files (see ``loader.py``), requests or sampling. Load, run and free it on
one thread: MLX streams belong to threads. This is the plain version. The later, fast one keeps the
batch of decoding sequences in place between steps, verifies drafts of unequal length in one call, samples
with MLX on Metal, and can be aborted; here ``abort`` has no effect, and the capabilities say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from enginehouse.backend import RunnerCapabilities, Span, Tokenizer
from enginehouse.errors import EngineError
from enginehouse.slot_table import SlotTable, num_tokens
from enginehouse.types import ModelInfo
from enginehouse_mlx.cache import Batch, SlotMemory
from enginehouse_mlx.halves import ModelHalves
from enginehouse_mlx.tokenizer import ModelText

__all__ = ["LogitsRows", "MlxRunner"]


class LogitsRows:
    """Rows of one forward pass; ``logits`` is (num_rows, vocab_size) float32, evaluated."""

    def __init__(self, logits: mx.array) -> None:
        self.num_rows = int(logits.shape[0])
        self._logits = logits

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable: the memory of the MLX array itself."""
        return np.asarray(self._logits)


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
        hidden: dict[int, mx.array] = {}
        try:
            for group in self._groups(spans):
                hidden |= self._run([spans[i] for i in group], group)
            wanted = [rows for i, rows in sorted(hidden.items()) if len(rows)]
            width = self.info.vocab_size
            logits = self._halves.head(mx.concatenate(wanted)) if wanted else mx.zeros((0, width))
            logits = logits.astype(mx.float32)
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

    def _groups(self, spans: Sequence[Span]) -> list[list[int]]:
        """Indices of spans that may share a call."""
        if not self._halves.can_batch:
            return [[i] for i in range(len(spans))]
        by_size: dict[int, list[int]] = defaultdict(list)
        for i, span in enumerate(spans):
            by_size[num_tokens(span)].append(i)
        return list(by_size.values())

    def _run(self, spans: Sequence[Span], indices: Sequence[int]) -> dict[int, mx.array]:
        """Call the model on spans of equal length; the wanted rows (num_rows, width) by index."""
        batch = Batch(tuple(s.sequence for s in spans), tuple(s.start for s in spans), num_tokens(spans[0]))
        token_ids = mx.array(np.stack([np.asarray(span.input, np.int32) for span in spans]))
        output = self._halves.body(token_ids, self._memory.begin(batch))
        first = {"none": batch.num_tokens, "last": batch.num_tokens - 1, "all": 0}
        return {
            index: output[row, first[span.outputs] :]
            for row, (index, span) in enumerate(zip(indices, spans, strict=True))
        }
