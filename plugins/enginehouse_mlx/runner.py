"""Runner over an mlx-lm model: spans of similar length share a model call, others follow in the same step.

All decoding sequences thus run as one batch, including drafts of unequal length, and prefill chunks one by one.
Handles sequences, slots and logits. Does not know files (see ``loader.py``) or requests. Load, run and free it on one
thread: MLX streams belong to threads. ``abort`` has no effect, as declared in the capabilities: MLX evaluates a step
as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import RunnerCapabilities, Span, Tokenizer
from enginehouse.contract.errors import EngineError
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.lora_folder import read_invocation_tokens
from enginehouse_backendkit.saved_states import check_head
from enginehouse_backendkit.slot_table import SlotTable, checked_length, num_tokens
from enginehouse_mlx.adapters import Adapters
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.depth import LayeredModel
from enginehouse_mlx.history import History
from enginehouse_mlx.states import pack_sequence, state_format, unpack_sequence

__all__ = ["LogitsRows", "MlxRunner", "groups_of", "num_rows"]

_SHORT_TOKENS = 16


class LogitsRows:
    """Rows of one forward pass; ``logits`` is (num_rows, vocab_size) float32."""

    def __init__(self, logits: mx.array) -> None:
        self.num_rows = int(logits.shape[0])
        self.logits = logits

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable: the memory of the MLX array itself."""
        return np.asarray(self.logits)

    def select(self, rows: Sequence[int]) -> LogitsRows:
        """Select rows."""
        return LogitsRows(self.logits[mx.array(list(rows))])


class MlxRunner:
    """Implements ``StateKeeper``, ``AdapterKeeper`` and ``CheckpointKeeper``; a sequence is a slot of its memory.

    Args:
        max_checkpoints: maximum number of checkpoints over all sequences; they are kept of recurrent models only.
    """

    def __init__(
        self,
        model: LayeredModel,
        memory: SlotMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
        *,
        max_checkpoints: int,
    ) -> None:
        self.capabilities = capabilities
        self.tokenizer: Tokenizer = text.tokenizer
        self.info = info
        self.state_format = state_format(memory, info.metadata)
        self.model: Any = model
        self._memory: Any = memory
        self._adapters: Any = Adapters(model)
        self._history: Any = History(memory, max_checkpoints)
        self._table = SlotTable(capabilities, info.vocab_size)

    def open_sequence(self) -> int:
        """Allocate a slot for a new, empty sequence."""
        return self._table.open()

    def free_sequence(self, sequence: int) -> None:
        """Free the slot of a sequence."""
        self._table.free(sequence)
        self._history.free(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens in the sequence."""
        return self._table.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end: to any length, as sliding-window layers keep every position, or to a checkpoint."""
        held, kept = self.length(sequence), self.kept_length(sequence, length)
        self._history.cut(sequence, held, kept)
        return self._table.truncate(sequence, kept)

    def kept_length(self, sequence: int, length: int) -> int:
        """See :class:`enginehouse.contract.backend.CutPlanner`."""
        return int(self._history.kept_length(sequence, self.length(sequence), checked_length(length)))

    def keep_checkpoint(self, sequence: int) -> None:
        """See :class:`enginehouse.contract.checkpoints.CheckpointKeeper`."""
        self._history.keep(sequence, self.length(sequence))

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Copy the first ``length`` positions into a new slot; states of recurrent layers are shared."""
        sequence, kept = self._table.fork(source, self.kept_length(source, length))
        self._memory.copy(source, sequence, kept)
        self._history.share(source, self.length(source), sequence, kept)
        return sequence, kept

    def save(self, sequence: int) -> memoryview:
        """See :class:`enginehouse.contract.backend.StateKeeper`."""
        length = self._table.saved_length(sequence)
        return pack_sequence(self._memory, sequence, length, self._history.saved(sequence, length), self.state_format)

    def load(self, data: memoryview) -> int:
        """See :class:`enginehouse.contract.backend.StateKeeper`."""
        num_tokens = check_head(data, self.state_format)
        arrays, states = unpack_sequence(self._memory, num_tokens, data)
        sequence = self._table.adopt(num_tokens)
        self._memory.write(sequence, arrays)
        self._history.restore(sequence, states)
        return sequence

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """Return the tokens that activate an adapter in PEFT's format; () for plain ones."""
        return read_invocation_tokens(path)

    def load_adapter(self, path: Path) -> int:
        """Load a LoRA from a folder; see :func:`enginehouse_mlx.lora_files.read_adapter`."""
        return int(self._adapters.load(path))

    def unload_adapter(self, adapter: int) -> None:
        """Free an adapter."""
        self._adapters.unload(adapter)

    def free_tokens(self) -> int:
        """Number of positions not used by any sequence."""
        return self._table.free_tokens()

    def forward(self, spans: Sequence[Span]) -> LogitsRows:
        """Append all spans; if it fails, no sequence has grown."""
        self._check(spans)
        try:
            with self._memory.one_pass():
                rows = self._rows(spans)
                mx.eval(rows.logits, self._memory.changed)
        except RuntimeError as error:  # MLX's error type, which includes out of memory
            raise EngineError(f"mlx: the forward pass failed: {error}") from error
        self._table.advance(spans)
        return rows

    def abort(self) -> None:
        """No effect: MLX evaluates a step as a whole."""

    def close(self) -> None:
        """Release weights and KV memory. Idempotent."""
        self.model = self._memory = self._adapters = self._history = None
        mx.clear_cache()

    def _check(self, spans: Sequence[Span]) -> None:
        """Validate a batch; nothing is changed. Raises as :meth:`forward`."""
        self._table.check(spans)
        for span in spans:
            self._adapters.check(span.adapter)

    def _rows(self, spans: Sequence[Span]) -> LogitsRows:
        """Rows of checked spans, not yet evaluated."""
        return LogitsRows(self._logits(spans))

    def _logits(self, spans: Sequence[Span]) -> mx.array:
        """(num_rows, vocab_size) float32 of checked spans, not yet evaluated."""
        hidden: dict[int, mx.array] = {}
        for group in self._calls(spans):
            hidden |= self._run([spans[i] for i in group], group)
        wanted = [rows for _, rows in sorted(hidden.items()) if len(rows)]
        width = self.info.vocab_size
        logits = self.model.halves.head(mx.concatenate(wanted)) if wanted else mx.zeros((0, width))
        return logits.astype(mx.float32)

    def _calls(self, spans: Sequence[Span]) -> Iterator[list[int]]:
        """Yield groups of span indices that share a model call; their spans run the same layers."""
        depths: dict[int | None, list[int]] = defaultdict(list)
        for i, span in enumerate(spans):
            depths[span.num_layers].append(i)
        for indices in depths.values():
            sizes = [num_tokens(spans[i]) for i in indices]
            can_pad = not self._memory.states
            groups = (
                groups_of(sizes, can_pad) if self.model.halves.can_batch else [[place] for place in range(len(sizes))]
            )
            yield from ([indices[place] for place in group] for group in groups)

    def _run(self, spans: Sequence[Span], indices: Sequence[int]) -> dict[int, mx.array]:
        """Call the model on a group of spans; returns the requested rows (num_rows, width) by index.

        Shorter spans are padded at the end. The padding's results are dropped; its positions are beyond the sequence's
        length, so they are overwritten before they are read.
        """
        sizes = [num_tokens(span) for span in spans]
        batch = Batch(tuple(s.sequence for s in spans), tuple(s.start for s in spans), max(sizes))
        token_ids = np.zeros((len(spans), batch.num_tokens), np.int32)
        for row, span in enumerate(spans):
            token_ids[row, : sizes[row]] = span.input
        body = self.model.body(spans[0].num_layers)
        with self._adapters.applied([span.adapter for span in spans], batch.num_tokens):
            output = body(self._inputs(mx.array(token_ids), spans), self._memory.begin(batch))
        rows = {}
        for row, (index, span, size) in enumerate(zip(indices, spans, sizes, strict=True)):
            rows[index] = output[row, size - num_rows(span) : size]
        return rows

    def _inputs(self, token_ids: mx.array, _spans: Sequence[Span]) -> mx.array:
        """(num_spans, num_tokens) int32, input of the model call."""
        return token_ids


def num_rows(span: Span) -> int:
    """Number of rows of logits that the span produces."""
    return {"none": 0, "last": 1, "all": span.num_tokens}[span.outputs]


def groups_of(sizes: Sequence[int], can_pad: bool = True) -> list[list[int]]:
    """Group span indices that share a model call.

    Short spans (single tokens, drafts) share one call and are padded to the longest, unless more than half of the
    computation would be padding; all others need the same size.

    Args:
        sizes: number of tokens of each span.
        can_pad: False: all spans of a call need the same size, as padding would change the states of recurrent layers.
    """
    short = [i for i, size in enumerate(sizes) if size <= _SHORT_TOKENS]
    is_worth_it = can_pad and len(short) * max((sizes[i] for i in short), default=0) <= 2 * sum(sizes[i] for i in short)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        groups[0 if size <= _SHORT_TOKENS and is_worth_it else size].append(i)
    return list(groups.values())
