"""Sequence operations on llama.cpp's memory: remove, share, move and measure, with model-specific rules.

There are three kinds of memory. A full KV cache can be cut anywhere. A sliding-window cache may have lost positions
before the window, yet llama.cpp accepts a cut that needs them. A recurrent state (Mamba and hybrids) has only its
newest position; a copy of it can be restored, after which positions of the other layers can be removed.

llama.cpp has snapshots of its own (``n_rs_seq``), which are not used: they reach a few tokens back, once, and move the
position of all sequences that share a state.
"""

from __future__ import annotations

import ctypes

from enginehouse.contract.errors import RunnerError
from enginehouse_llamacpp.library import Bindings

__all__ = ["SequenceMemory", "State"]

State = ctypes.Array[ctypes.c_uint8]
"""Data that llama.cpp wrote of a sequence."""


class SequenceMemory:
    """Memory of one ``llama_context``; sequences are llama.cpp's ids. All methods take and return positions.

    Args:
        context: address of the ``llama_context``.
        window_tokens: size of the model's sliding window; 0 means none.
        is_recurrent: some layers keep a state instead of positions.
    """

    def __init__(self, bindings: Bindings, context: int, window_tokens: int, is_recurrent: bool) -> None:
        self._bindings, self._context = bindings, context
        self._memory = bindings.llama_get_memory(context)
        self._window_tokens, self.is_recurrent = window_tokens, is_recurrent

    @property
    def has_positions_only(self) -> bool:
        """True if every layer keeps every position, so all cells are alike."""
        return self._window_tokens == 0 and not self.is_recurrent

    def clear(self) -> None:
        """Remove all sequences."""
        self._bindings.llama_memory_clear(self._memory, False)

    def next_position(self, sequence: int) -> int:
        """The position after the last one that llama.cpp holds for ``sequence``."""
        return int(self._bindings.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Remove positions ``start`` to ``end`` (exclusive, -1: all). False: refused, nothing changed."""
        return bool(self._bindings.llama_memory_seq_rm(self._memory, sequence, start, end))

    def share(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Make ``target`` share these positions of ``source``; nothing is copied."""
        self._bindings.llama_memory_seq_cp(self._memory, source, target, start, end)

    def can_cut(self, sequence: int, position: int) -> bool:
        """True if all positions that ``position`` attends to are still present; it is before the end.

        Source: llama.cpp's ``server-context.cpp``, the check of ``pos_min`` before it reuses a prefix.
        """
        if self.is_recurrent:
            return False
        if self._window_tokens == 0:
            return True
        first = self._bindings.llama_memory_seq_pos_min(self._memory, sequence)
        return bool(first == 0 or 0 < first < position - self._window_tokens)

    def save(self, sequence: int, num_head_bytes: int = 0) -> State:
        """Copy the whole state of ``sequence``, after ``num_head_bytes`` bytes that are left free."""
        return self._copy(sequence, 0, num_head_bytes)

    def save_state(self, sequence: int) -> State:
        """Copy what the recurrent layers hold of ``sequence``."""
        return self._copy(sequence, self._bindings.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _copy(self, sequence: int, flags: int, num_head_bytes: int = 0) -> State:
        size = self._bindings.llama_state_seq_get_size_ext(self._context, sequence, flags)
        data: State = (ctypes.c_uint8 * (num_head_bytes + size))()
        body = (ctypes.c_uint8 * size).from_buffer(data, num_head_bytes)
        if self._bindings.llama_state_seq_get_data_ext(self._context, body, size, sequence, flags) != size:
            raise RunnerError("llama.cpp could not save a sequence")
        return data

    def restore(self, sequence: int, data: State) -> None:
        """Restore a saved state into ``sequence``, in the first empty cells after the head."""
        if not self._bindings.llama_state_seq_set_data(self._context, data, len(data), sequence):
            raise RunnerError("llama.cpp could not restore a sequence")

    def restore_state(self, sequence: int, data: State) -> None:
        """Restore what :meth:`save_state` returned, of this sequence or another one that began alike."""
        flags = self._bindings.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if not self._bindings.llama_state_seq_set_data_ext(self._context, data, len(data), sequence, flags):
            raise RunnerError("llama.cpp could not restore the state of a sequence")
