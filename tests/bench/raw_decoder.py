"""``llama_decode`` and nothing else, driven from numpy: the floor that an engine's step is measured against.

Run as a program (``python -m bench.raw_decoder GGUF``) it decodes one token with llama.cpp's extra weight
buffers and ends well, or dies trying. ``extra_buffers_work`` uses that: some virtual machines announce AMX and
kill whoever uses it. There, every user of the locally built library runs without these buffers.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llama_cpp.llama_cpp as library
import numpy as np
from numpy.typing import NDArray

__all__ = ["RawDecoder", "extra_buffers_work"]

_TESTS_FOLDER = Path(__file__).parents[1]
_MAX_BATCH_TOKENS = 2048


@library.llama_log_callback  # kept alive by the module, as the library calls it at any time
def _drop_log(level: int, text: bytes, user_data: object) -> None:
    pass


class RawDecoder:
    """One model with one context over unified KV.

    Args:
        model_file: GGUF file.
        num_threads: of decoding and prefill alike.
        max_sequences: how many sequences are decoded at once.
        extra_buffers: let the library repack weights for this CPU.
        context: KV positions over all sequences.
    """

    def __init__(
        self, model_file: Path, num_threads: int, max_sequences: int, extra_buffers: bool, context: int = 8192
    ) -> None:
        library.llama_log_set(_drop_log, ctypes.c_void_p(0))
        library.llama_backend_init()
        model_parameters = library.llama_model_default_params()
        model_parameters.use_extra_bufts = extra_buffers
        self._model = library.llama_model_load_from_file(str(model_file).encode(), model_parameters)
        parameters = library.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = context, _MAX_BATCH_TOKENS, max_sequences
        parameters.n_threads = parameters.n_threads_batch = num_threads
        parameters.kv_unified = True
        self._context = library.llama_init_from_model(self._model, parameters)
        self._allocate_batch()
        self.vocab_size: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def _allocate_batch(self) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(_MAX_BATCH_TOKENS, np.int32) for _ in range(3))
        self._num_sequence_ids = np.ones(_MAX_BATCH_TOKENS, np.int32)
        self._wants_row = np.zeros(_MAX_BATCH_TOKENS, np.int8)
        self._sequence_pointers = (self._sequences.ctypes.data + 4 * np.arange(_MAX_BATCH_TOKENS)).astype(np.uintp)
        self._batch = library.llama_batch()
        self._batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._batch.n_seq_id = self._num_sequence_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._batch.seq_id = ctypes.cast(
            self._sequence_pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        )
        self._batch.logits = self._wants_row.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def clear(self) -> None:
        """Forget every sequence."""
        library.llama_memory_clear(library.llama_get_memory(self._context), False)

    def prefill(self, sequence: int, token_ids: Sequence[int]) -> int:
        """Start a sequence; returns its most probable next token."""
        num = len(token_ids)
        self._tokens[:num] = token_ids
        self._positions[:num] = np.arange(num)
        self._sequences[:num] = sequence
        self._wants_row[:num] = 0
        self._wants_row[num - 1] = 1
        self._decode(num)
        return int(self.rows(1).argmax())

    def step(self, token_ids: NDArray[np.int32], position: int) -> None:
        """Append one token to each of the first ``len(token_ids)`` sequences and wait until that is computed."""
        num = len(token_ids)
        self._tokens[:num] = token_ids
        self._positions[:num] = position
        self._sequences[:num] = np.arange(num)
        self._wants_row[:num] = 1
        self._decode(num)
        library.llama_synchronize(self._context)

    def _decode(self, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        code = library.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}.")

    def rows(self, num_rows: int) -> NDArray[np.float32]:
        """``(num_rows, vocab_size)`` float32 logits of the last step, valid until the next one."""
        pointer = library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self.vocab_size))

    def close(self) -> None:
        """Free context and model."""
        library.llama_free(self._context)
        library.llama_model_free(self._model)


@cache
def extra_buffers_work(model_file: Path) -> bool:
    """Whether decoding with extra weight buffers survives on this machine; tried in a process of its own."""
    command = [sys.executable, "-m", "bench.raw_decoder", str(model_file)]
    return subprocess.run(command, cwd=_TESTS_FOLDER, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    decoder = RawDecoder(Path(sys.argv[1]), num_threads=1, max_sequences=1, extra_buffers=True, context=256)
    decoder.prefill(0, list(range(64)))
    decoder.close()
