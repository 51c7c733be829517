"""The pooler: one forward pass over many texts, each a sequence of its own, without padding.

llama.cpp ends the process when a pass of an encoder has more tokens than its ``n_ubatch``, and for positions beyond the
model's table, so every pass is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import InvalidSpan, RunnerError, StepAborted
from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.threads import ThreadChooser
from enginehouse_llamacpp.batch import Batch
from enginehouse_llamacpp.codes import ERRORS, DecodeCode
from enginehouse_llamacpp.context import Context
from enginehouse_llamacpp.log import LogBuffer
from enginehouse_llamacpp.pooling import Head
from enginehouse_llamacpp.sizes import SHORT_TEXT_TOKENS
from enginehouse_llamacpp.spans import check_batch_ids

__all__ = ["LlamaCppPooler"]

_WARM_UP_TOKENS = 32


class LlamaCppPooler:
    """Implements :class:`enginehouse.contract.pooler.Pooler`; made by :func:`enginehouse_llamacpp.loader.open_pooler`.

    llama.cpp computes all tokens with token type 0, so the layout of pairs has no types.

    Args:
        capabilities, tokenizer, info: see the contract.
        head: rows that llama.cpp gives.
        context: computes passes; closed by :meth:`close`.
        short_context: computes single texts of at most ``SHORT_TEXT_TOKENS``; None leaves them to ``context``.
        batch: refilled by each pass.
        threads: chooses the number of threads for each pass.
        log: provides the reasons for llama.cpp's failures.
        free_model: called once, after the context is closed.
    """

    def __init__(
        self,
        *,
        capabilities: PoolerCapabilities,
        tokenizer: Tokenizer,
        info: ModelInfo,
        head: Head,
        context: Context,
        short_context: Context | None,
        batch: Batch,
        threads: ThreadChooser,
        log: LogBuffer,
        free_model: Callable[[], None],
    ) -> None:
        self.capabilities, self.info = capabilities, info
        self.tokenizer: Tokenizer = tokenizer
        self._head, self._context, self._short_context, self._batch = head, context, short_context, batch
        self._threads, self._log, self._free_model = threads, log, free_model
        self._is_closed = False

    def pool(self, inputs: Sequence[PoolerInput]) -> NDArray[np.float32]:
        """Compute one pass; for errors see the contract, and InvalidSpan for what core never sends."""
        self._fill(inputs)
        batch = self._batch
        threads = self._threads.choose(batch.num_tokens)
        context = self._context
        if self._short_context is not None and len(inputs) == 1 and batch.num_tokens <= SHORT_TEXT_TOKENS:
            context = self._short_context
        context.use_threads(threads)
        started = perf_counter()
        try:
            code = context.decode(batch)
        finally:
            context.clear()
        if code != DecodeCode.OK:
            raise self._failed(code)
        rows = self._head.rows(context.pooled_rows(len(inputs), self._head.width))
        self._threads.record(batch.num_tokens, threads, perf_counter() - started)
        if self._head.task == "embed" and self.capabilities.is_normalized:
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows /= np.where(lengths > 0, lengths, 1)
        return rows

    def abort(self) -> None:
        """Request a running ``pool`` to stop soon."""
        for context in self._contexts():
            context.abort()

    def close(self) -> None:
        """Free the context and the model; idempotent."""
        if not self._is_closed:
            self.close_context()
            self._free_model()

    def close_context(self) -> None:
        """Free the context only; the pooler is unusable afterwards, but its model is not."""
        self._is_closed = True
        for context in self._contexts():
            context.close()

    def _contexts(self) -> list[Context]:
        return [context for context in (self._context, self._short_context) if context is not None]

    def warm_up(self) -> None:
        """Compute a short pass, which reads all weights."""
        limits = self.capabilities
        added = limits.text.num_added(is_pair=False)
        first_ids = list(range(min(_WARM_UP_TOKENS, self.info.vocab_size, limits.max_tokens) - added))
        self.pool([limits.text.arrange(first_ids or [0])])

    def _fill(self, inputs: Sequence[PoolerInput]) -> None:
        """Check all inputs and add them to the batch."""
        batch, limits = self._batch, self.capabilities
        batch.clear()
        if not 0 < len(inputs) <= limits.max_batch_texts:
            raise InvalidSpan(f"a pass has 1 to {limits.max_batch_texts} texts, not {len(inputs)}")
        for number, one in enumerate(inputs):
            length = len(one.token_ids)
            if not 0 < length <= limits.max_tokens:
                raise InvalidSpan(f"text {number} has {length} tokens; 1 to {limits.max_tokens} are possible")
            if batch.num_tokens + length > limits.max_batch_tokens:
                raise InvalidSpan(f"the pass has more than {limits.max_batch_tokens} tokens")
            batch.add(number, 0, one.token_ids, "all")
        check_batch_ids(batch.finish(), self.info.vocab_size)

    def _failed(self, code: int) -> RunnerError:
        error = ERRORS.get(code, RunnerError)
        if error is StepAborted:
            return StepAborted({})
        return RunnerError(f"llama.cpp could not compute a pass (code {code}): {self._log.reason()}")
