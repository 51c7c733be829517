"""One ``llama_context``: runs forward passes over a filled batch, returns their logits, aborts them.

Validates nothing: llama.cpp terminates the process on some errors, so :mod:`enginehouse_llamacpp.runner` checks first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import ModelLoadError, RunnerError
from enginehouse_llamacpp.batch import Batch, EmbeddingBatch
from enginehouse_llamacpp.library import Bindings, Library
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.sizes import CacheSizes

__all__ = ["Context"]


class Context:
    """Computes batches for one model. Single-threaded, except :meth:`abort`.

    Args:
        pooling_type: llama.cpp's number of how rows of a pooling model are made; None for logits.

    Attributes:
        bindings: llama.cpp.
        address: the ``llama_context``.
    """

    def __init__(
        self,
        library: Library,
        model: int,
        options: LlamaCppOptions,
        sizes: CacheSizes,
        threads: int,
        *,
        pooling_type: int | None = None,
    ) -> None:
        bindings = self.bindings = library.bindings
        library.log.clear()
        params = _context_params(bindings, options, sizes, threads)
        if pooling_type is not None:
            params.embeddings, params.pooling_type = True, pooling_type
        address = bindings.llama_init_from_model(model, params)
        if not address:
            raise ModelLoadError(
                f"llama.cpp cannot make a cache of {sizes.num_cells} tokens: {library.log.reason()}; "
                "a smaller cache_tokens or context needs less memory"
            )
        self.address: int = address
        self._vocab_size = bindings.llama_vocab_n_tokens(bindings.llama_model_get_vocab(model))
        self._abort_flag = ctypes.create_string_buffer(2)
        self._abort_callback = library.strlen
        bindings.llama_set_abort_callback(address, self._abort_callback, ctypes.addressof(self._abort_flag))
        self._get_logits = _as_address_function(bindings._lib.llama_get_logits, 1)
        self._get_pooled = _as_address_function(bindings._lib.llama_get_embeddings_seq, 2)
        self._logits_address = 0
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._threads = threads

    @property
    def num_cells(self) -> int:
        """Number of KV positions that llama.cpp allocated, at least the requested number."""
        return int(self.bindings.llama_n_ctx(self.address))

    def use_threads(self, threads: int) -> None:
        """Set the number of threads for the next batches."""
        if threads != self._threads:
            self.bindings.llama_set_n_threads(self.address, threads, threads)
            self._threads = threads

    def decode(self, batch: Batch) -> int:
        """Compute a finished batch with the GIL released; see :class:`enginehouse_llamacpp.codes.DecodeCode`."""
        self._abort_flag[0] = b"\0"
        code: int = self.bindings.llama_decode(self.address, batch.raw)
        self._abort_flag[0] = b"\0"
        return code

    def decode_embeddings(self, batches: Sequence[EmbeddingBatch], *, is_causal: bool) -> int:
        """Compute the parts of an image one after the other, up to the first that fails; returns like :meth:`decode`.

        Without ``is_causal``, the tokens of a batch attend to each other. llama.cpp ends the process if such a batch
        has more tokens than it computes at once.
        """
        self._abort_flag[0] = b"\0"
        code = 0
        if not is_causal:
            self.bindings.llama_set_causal_attn(self.address, False)
        for batch in batches:
            code = self.bindings.llama_decode(self.address, batch.raw)
            if code:
                break
        if not is_causal:
            self.bindings.llama_set_causal_attn(self.address, True)
        self._abort_flag[0] = b"\0"
        return code

    def rows(self, num_rows: int) -> NDArray[np.float32]:
        """Logits of the last batch, (num_rows, vocab_size) float32: llama.cpp's own memory, not a copy."""
        address = self._get_logits(self.address)
        if address != self._logits_address or num_rows > len(self._logits):
            memory = (ctypes.c_float * (num_rows * self._vocab_size)).from_address(address)
            self._logits = np.frombuffer(memory, np.float32).reshape(num_rows, self._vocab_size)
            self._logits_address = address
        return self._logits[:num_rows]

    def pooled_rows(self, num_rows: int, width: int) -> NDArray[np.float32]:
        """Copies of the rows of sequences 0 to ``num_rows`` of the last batch, (num_rows, width) float32.

        Raises:
            RunnerError: llama.cpp has no row for a sequence.
        """
        rows = np.empty((num_rows, width), np.float32)
        for sequence in range(num_rows):
            address = self._get_pooled(self.address, sequence)
            if not address:
                raise RunnerError(f"llama.cpp gave no row for text {sequence} of the pass")
            ctypes.memmove(rows[sequence].ctypes.data, address, rows.itemsize * width)
        return rows

    def clear(self) -> None:
        """Forget all sequences; does nothing for a model without a KV cache."""
        if memory := self.bindings.llama_get_memory(self.address):
            self.bindings.llama_memory_clear(memory, False)

    def abort(self) -> None:
        """Stop a running :meth:`decode` soon; thread-safe. llama.cpp checks between the nodes of its graph."""
        self._abort_flag[0] = b"\1"

    def close(self) -> None:
        """Free the context and its cache."""
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self.bindings.llama_free(self.address)


def _context_params(bindings: Bindings, options: LlamaCppOptions, sizes: CacheSizes, threads: int) -> Any:
    """Build the parameters of ``llama_init_from_model``."""
    params = bindings.llama_context_default_params()
    params.n_ctx = sizes.num_cells
    params.n_seq_max = sizes.num_sequence_ids
    params.n_batch = sizes.batch_tokens
    params.n_ubatch = sizes.chunk_tokens
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    params.swa_full = options.swa_full
    params.type_k = sizes.type_k
    params.type_v = sizes.type_v
    if options.rope_scaling is not None:
        params.rope_scaling_type = getattr(bindings, f"LLAMA_ROPE_SCALING_TYPE_{options.rope_scaling.upper()}")
    if options.rope_freq_base is not None:
        params.rope_freq_base = options.rope_freq_base
    if options.rope_freq_scale is not None:
        params.rope_freq_scale = options.rope_freq_scale
    if options.yarn_orig_ctx is not None:
        params.yarn_orig_ctx = options.yarn_orig_ctx
    if options.flash_attn is not None:
        params.flash_attn_type = int(options.flash_attn)
    return params


def _as_address_function(function: Any, num_arguments: int) -> Callable[..., int]:
    """Return a function of a context, and numbers, that gives a plain address: the binding makes an object per call."""
    arguments = (ctypes.c_void_p, ctypes.c_int32)[:num_arguments]
    return ctypes.cast(function, ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments))
