"""The runner: forward passes over sequences, each validated before llama.cpp receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import RunnerCapabilities, Span, Tokenizer
from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StepAborted
from enginehouse.contract.media import MAX_IMAGE_PIXELS, DecodedAudio, DecodedImage, MediaChunk, MediaInput
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.threads import ThreadChooser
from enginehouse_llamacpp.adapters import Adapters, read_invocation_tokens
from enginehouse_llamacpp.batch import Batch, EmbeddingBatch
from enginehouse_llamacpp.codes import ERRORS, DecodeCode, is_unchanged
from enginehouse_llamacpp.context import Context
from enginehouse_llamacpp.log import LogBuffer
from enginehouse_llamacpp.projector import Projector
from enginehouse_llamacpp.sequences import SequenceTable
from enginehouse_llamacpp.spans import check_batch_ids, check_chunk, check_span

__all__ = ["LlamaCppRunner"]


class _Rows:
    """Implements :class:`enginehouse.contract.backend.ForwardOutput` over llama.cpp's own memory."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows
        self.num_rows = len(rows)

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable; valid until the next ``forward``."""
        return self._rows


class LlamaCppRunner:
    """Implements :class:`enginehouse.contract.backend.Runner`; made by :func:`enginehouse_llamacpp.loader.open_runner`.

    Args:
        capabilities, tokenizer, info: see the contract.
        context: computes batches; closed by :meth:`close`.
        sequences: the open sequences.
        adapters: adapters of the context.
        projector: reads images and recordings; None for a model that takes text only.
        batch: refilled by each forward pass.
        threads: chooses the number of threads for each batch.
        log: provides the reasons for llama.cpp's failures.
        free_model: called once, after the context is closed.
        state_format: see :class:`enginehouse.contract.backend.StateKeeper`.
    """

    max_image_pixels = MAX_IMAGE_PIXELS

    def __init__(
        self,
        *,
        capabilities: RunnerCapabilities,
        tokenizer: Tokenizer,
        info: ModelInfo,
        context: Context,
        sequences: SequenceTable,
        adapters: Adapters,
        projector: Projector | None,
        batch: Batch,
        threads: ThreadChooser,
        log: LogBuffer,
        free_model: Callable[[], None],
        state_format: str,
    ) -> None:
        self.capabilities, self.info = capabilities, info
        self.state_format = state_format
        self.tokenizer: Tokenizer = tokenizer
        self._context, self.sequences, self._adapters = context, sequences, adapters
        self._projector = projector
        self.audio_rate = projector.audio_rate if projector is not None else 0
        self._batch, self._threads, self._log, self._free_model = batch, threads, log, free_model
        self._is_closed = False
        self._no_rows = np.empty((0, info.vocab_size), np.float32)

    def open_sequence(self) -> int:
        """Open a new, empty sequence."""
        return self.sequences.open()

    def free_sequence(self, sequence: int) -> None:
        """Free the sequence and its KV positions."""
        self.sequences.free(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens in the sequence."""
        return self.sequences.held(sequence).num_tokens

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end; keeps 0 if a sliding window cannot be cut, and no checkpoint is before the end."""
        return self.sequences.truncate(sequence, length)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Create a sequence that shares the first tokens of ``source``; nothing is copied."""
        return self.sequences.fork(source, length)

    def kept_length(self, sequence: int, length: int) -> int:
        """Length that a cut to ``length`` would keep: ``length``, that of a checkpoint, or 0."""
        return self.sequences.kept_length(sequence, length)

    def keep_checkpoint(self, sequence: int) -> None:
        """Keep a copy of the state of the sequence, which has recurrent layers."""
        self.sequences.keep_checkpoint(sequence)

    def save(self, sequence: int) -> memoryview:
        """Return a copy of the whole state of the sequence."""
        return self.sequences.save(sequence)

    def load(self, data: memoryview) -> int:
        """Create a sequence from a saved one; it continues exactly as the original would."""
        return self.sequences.load(data)

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """Return the tokens that activate an adapter in a GGUF file; () for plain ones."""
        return read_invocation_tokens(path)

    def load_adapter(self, path: Path) -> int:
        """Load a LoRA from a GGUF file."""
        return self._adapters.load(path)

    def unload_adapter(self, adapter: int) -> None:
        """Free an adapter."""
        self._adapters.unload(adapter)

    def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of an image; thread-safe."""
        return self._media().prepare(image)

    def prepare_audio(self, audio: DecodedAudio) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of a recording; thread-safe."""
        return self._media().prepare_audio(audio)

    def encode(self, chunk: MediaChunk) -> NDArray[np.float32]:
        """Return the embedding of a chunk, (num_tokens, width) float32."""
        return self._media().encode(chunk)

    def free_tokens(self) -> int:
        """Number of free KV positions."""
        return self.sequences.num_free_tokens

    def forward(self, spans: Sequence[Span]) -> _Rows:
        """Append every span to its sequence in one pass; for errors see the contract."""
        if len(spans) == 1 and isinstance(media := spans[0].input, MediaInput):
            return self._forward_chunk(spans[0], media)
        self._fill(spans)
        batch = self._batch
        head = self.sequences.append([span.sequence for span in spans], batch.counts)
        self._adapters.use(spans[0].adapter)
        threads = self._threads.choose(batch.num_tokens)
        self._context.use_threads(threads)
        started = perf_counter()
        code = self._context.decode(batch)
        if code != DecodeCode.OK:
            raise self._failed(code, spans, head)
        rows = self._context.rows(batch.num_rows) if batch.num_rows else self._no_rows
        self._threads.record(batch.num_tokens, threads, perf_counter() - started)
        return _Rows(rows)

    def _forward_chunk(self, span: Span, media: MediaInput) -> _Rows:
        """Append an image; it is divided into batches unless its tokens attend to each other."""
        projector, chunk, sequence = self._media(), media.chunk, span.sequence
        embedding = check_chunk(span, media, self.length(sequence), self.capabilities.max_context, projector.width)
        self._adapters.check(span.adapter)
        size = self.capabilities.max_batch_tokens
        is_causal = projector.is_causal(chunk)
        if not is_causal and chunk.num_tokens > projector.batch_tokens:
            raise InvalidSpan(f"sequence {sequence}: the chunk has more than {projector.batch_tokens} tokens")
        positions = projector.positions(chunk, self.sequences.position(sequence))
        batches = [
            EmbeddingBatch(self._context.bindings, sequence, embedding[at : at + size], positions[:, at : at + size])
            for at in range(0, chunk.num_tokens, size)
        ]
        self.sequences.append_chunk(sequence, [batch.num_tokens for batch in batches], chunk.num_positions)
        self._adapters.use(span.adapter)
        self._context.use_threads(self._threads.choose(min(size, chunk.num_tokens)))
        code = self._context.decode_embeddings(batches, is_causal=is_causal)
        if code != DecodeCode.OK:
            self.sequences.drop_chunk(sequence)
            raise self._error(code, chunk.num_tokens, {sequence: self.length(sequence)})
        return _Rows(self._no_rows)

    def _media(self) -> Projector:
        if self._projector is None:
            raise InvalidSpan("this model has no projector, so it takes no media")
        return self._projector

    def abort(self) -> None:
        """Request a running ``forward`` to stop soon."""
        self._context.abort()

    def close(self) -> None:
        """Free the context and the model; idempotent."""
        if not self._is_closed:
            self.close_context()
            if self._projector is not None:
                self._projector.close()
            self._free_model()

    def close_context(self) -> None:
        """Free the context only; the runner is unusable afterwards, but its model is not."""
        self._is_closed = True
        self._context.close()

    def _fill(self, spans: Sequence[Span]) -> None:
        """Check all spans and add them to the batch; nothing else changes."""
        batch, limits = self._batch, self.capabilities
        batch.clear()
        for span in spans:
            token_ids = check_span(span, self.length(span.sequence), limits.max_context)
            if batch.num_tokens + len(token_ids) > limits.max_batch_tokens:
                raise InvalidSpan(f"the batch has more than {limits.max_batch_tokens} tokens")
            batch.add(span.sequence, self.sequences.position(span.sequence), token_ids, span.outputs)
        if len({span.adapter for span in spans}) > 1:
            raise InvalidSpan("all spans of a pass must have the same adapters")
        self._adapters.check(spans[0].adapter if spans else ())
        if not batch.num_tokens:
            raise InvalidSpan("a forward pass needs at least one span")
        if len({span.sequence for span in spans}) != len(batch.counts):
            raise InvalidSpan("a sequence may have one span per forward pass")
        check_batch_ids(batch.finish(), self.info.vocab_size)

    def _failed(self, code: int, spans: Sequence[Span], head: int) -> RunnerError:
        """Return the error for a return code, after resynchronising our bookkeeping with llama.cpp."""
        sequences, starts = [span.sequence for span in spans], [span.start for span in spans]
        if is_unchanged(code):
            self.sequences.take_back(sequences, starts, head)
        return self._error(code, self._batch.num_tokens, self.sequences.resynchronise(sequences, starts))

    def _error(self, code: int, num_tokens: int, lengths: dict[int, int]) -> RunnerError:
        """Return the error for a return code of a pass of ``num_tokens`` tokens."""
        error = ERRORS.get(code, RunnerError)
        if error is CacheFull:
            # Our bookkeeping had free cells, so the smaller cache of a sliding-window layer is full.
            return CacheFull(num_tokens, min(self.free_tokens(), num_tokens - 1))
        if error is StepAborted:
            return StepAborted(lengths)
        return error(f"llama_decode failed with code {code}: {self._log.reason()}")
