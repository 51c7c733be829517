"""Input arrays of a forward pass: one ``llama_batch`` backed by numpy memory.

That of tokens is allocated once and filled span by span with slices, not token by token; that of an image's embedding
is made for each.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Outputs
from enginehouse_llamacpp.library import Bindings

__all__ = ["Batch", "EmbeddingBatch"]


class Batch:
    """Tokens of one forward pass.

    Attributes:
        raw: the ``llama_batch``; points into the arrays below, which live as long as this object.
        num_tokens: number of tokens filled in.
        num_rows: number of tokens that produce logits.
        counts: number of tokens of each span.
    """

    def __init__(self, bindings: Bindings, max_tokens: int) -> None:
        self._token_ids = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._sequence_ids = np.zeros(max_tokens, np.int32)
        self._num_sequence_ids = np.ones(max_tokens, np.int32)
        self._outputs = np.zeros(max_tokens, np.int8)
        addresses = self._sequence_ids.ctypes.data + 4 * np.arange(max_tokens + 1)
        addresses[max_tokens] = 0  # llama.cpp's end marker
        self._sequence_id_pointers = addresses.astype(np.uintp)
        self._count_up = np.arange(max_tokens, dtype=np.int32)
        self.num_tokens = self.num_rows = 0
        self.counts: list[int] = []
        self.raw = bindings.llama_batch()
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        self.raw.token = ctypes.cast(self._token_ids.ctypes.data, int_pointer)
        self.raw.pos = ctypes.cast(self._positions.ctypes.data, int_pointer)
        self.raw.n_seq_id = ctypes.cast(self._num_sequence_ids.ctypes.data, int_pointer)
        self.raw.seq_id = ctypes.cast(self._sequence_id_pointers.ctypes.data, ctypes.POINTER(int_pointer))
        self.raw.logits = ctypes.cast(self._outputs.ctypes.data, ctypes.POINTER(ctypes.c_int8))

    def clear(self) -> None:
        """Start a new batch."""
        self.num_tokens = self.num_rows = 0
        self.counts = []

    def add(self, sequence: int, start: int, token_ids: NDArray[np.int32], outputs: Outputs) -> None:
        """Append one span's tokens. ``token_ids``: (num_tokens,) int32; the caller has checked the capacity."""
        begin, count = self.num_tokens, len(token_ids)
        self.counts.append(count)
        self.num_tokens = end = begin + count
        if count == 1:  # decoding: assigning single items is faster than slices of length 1
            self._token_ids[begin], self._positions[begin] = token_ids[0], start
            self._sequence_ids[begin], self._outputs[begin] = sequence, outputs != "none"
            self.num_rows += outputs != "none"
            return
        self._token_ids[begin:end] = token_ids
        np.add(self._count_up[:count], start, out=self._positions[begin:end])
        self._sequence_ids[begin:end] = sequence
        self._outputs[begin:end] = outputs == "all"
        if outputs == "last":
            self._outputs[end - 1] = 1
        self.num_rows += count if outputs == "all" else outputs == "last"

    def finish(self) -> NDArray[np.int32]:
        """Set llama.cpp's token count and return the tokens, (num_tokens,) int32."""
        self.raw.n_tokens = self.num_tokens
        return self._token_ids[: self.num_tokens]


class EmbeddingBatch:
    """A part of an image's embedding, appended to one sequence without logits.

    Args:
        embedding: (num_tokens, width) float32, contiguous.
        positions: (1 or 4, num_tokens) int32; four under M-RoPE.

    Attributes:
        raw: the ``llama_batch``; points into arrays that live as long as this object.
    """

    def __init__(
        self, bindings: Bindings, sequence: int, embedding: NDArray[np.float32], positions: NDArray[np.int32]
    ) -> None:
        count = self.num_tokens = len(embedding)
        self._embedding, self._positions = embedding, np.ascontiguousarray(positions)
        self._sequence_id = np.array([sequence], np.int32)
        self._sequence_id_pointers = np.full(count + 1, self._sequence_id.ctypes.data, np.uintp)
        self._sequence_id_pointers[count] = 0
        self._num_sequence_ids, self._outputs = np.ones(count, np.int32), np.zeros(count, np.int8)
        self.raw = bindings.llama_batch()
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        self.raw.n_tokens = count
        self.raw.embd = ctypes.cast(embedding.ctypes.data, ctypes.POINTER(ctypes.c_float))
        self.raw.pos = ctypes.cast(self._positions.ctypes.data, int_pointer)
        self.raw.n_seq_id = ctypes.cast(self._num_sequence_ids.ctypes.data, int_pointer)
        self.raw.seq_id = ctypes.cast(self._sequence_id_pointers.ctypes.data, ctypes.POINTER(int_pointer))
        self.raw.logits = ctypes.cast(self._outputs.ctypes.data, ctypes.POINTER(ctypes.c_int8))
