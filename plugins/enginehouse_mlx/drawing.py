"""A runner that also samples tokens on the device, so that passes follow each other without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from attrs import evolve

from enginehouse.contract.backend import Draw, ForwardOutput, LastSampled, RunnerCapabilities, Span
from enginehouse.contract.errors import EngineError, InvalidSpan
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.depth import LayeredModel
from enginehouse_mlx.runner import LogitsRows, MlxRunner
from enginehouse_mlx.sampling import MlxDrawn, sample

__all__ = ["DrawingRunner"]

_UNKNOWN = np.zeros(1, np.int32)


class DrawingRunner(MlxRunner):
    """Implements :class:`enginehouse.contract.backend.DeviceSampler`.

    A pass is built and started, but not awaited: the next one can be built before its tokens are read.
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
        super().__init__(model, memory, capabilities, text, info, max_checkpoints=max_checkpoints)
        self._last = mx.zeros((capabilities.max_sequences,), mx.int32)
        self._drawn: set[int] = set()

    def free_sequence(self, sequence: int) -> None:
        """Free the slot and drop the tokens drawn for it."""
        super().free_sequence(sequence)
        self._drawn.discard(sequence)

    def forward(self, spans: Sequence[Span]) -> LogitsRows:
        """Build one pass over all spans and start it; if it fails, no sequence has grown."""
        known = [self._with_size(span) for span in spans]
        self._check(known)
        try:
            with self._memory.one_pass():
                rows = self._rows(known)
                mx.async_eval(rows.logits, self._memory.changed)
        except RuntimeError as error:
            raise EngineError(f"mlx: the forward pass failed: {error}") from error
        self._table.advance(known)
        return rows

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> MlxDrawn:
        """Start the draws; see :class:`enginehouse.contract.backend.DeviceSampler`."""
        assert isinstance(output, LogitsRows)
        drawn = sample(output.logits, draws)
        slots = [draw.sequence for draw in draws]
        self._last[mx.array(slots)] = mx.maximum(drawn.arrays[0], 0)
        self._drawn.update(slots)
        mx.async_eval(*drawn.arrays, self._last)
        return drawn

    def _inputs(self, token_ids: mx.array, spans: Sequence[Span]) -> mx.array:
        """(num_spans, num_tokens) int32, including tokens whose draws are pending."""
        late = [row for row, span in enumerate(spans) if span.input is _UNKNOWN]
        if late:
            token_ids[mx.array(late), 0] = self._last[mx.array([spans[row].sequence for row in late])]
        return token_ids

    def _with_size(self, span: Span) -> Span:
        """Return the span with a placeholder for a token whose draw is pending."""
        if not isinstance(span.input, LastSampled):
            return span
        if span.sequence not in self._drawn:
            raise InvalidSpan(f"sequence {span.sequence}: no token was drawn for it")
        return evolve(span, input=_UNKNOWN)
