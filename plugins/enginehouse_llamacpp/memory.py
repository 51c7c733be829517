"""Sequences in llama.cpp's memory: remove, share, move and measure, with the rules that models add.

Three kinds of memory behave differently. A full KV cache can be cut anywhere. A sliding-window cache may have lost
positions before the window, and llama.cpp still says yes to a cut that needs them. A recurrent state (Mamba and
hybrids) knows only its newest position.
"""

from __future__ import annotations

import ctypes

from enginehouse.contract.errors import RunnerError
from enginehouse_llamacpp.library import Bindings

__all__ = ["SequenceMemory"]


class SequenceMemory:
    """The memory of one ``llama_context``; sequences are llama.cpp's ids.

    Args:
        context: address of the ``llama_context``.
        window_tokens: size of the model's sliding window; 0: it has none.
        is_recurrent: some layers keep a state instead of positions.
    """

    def __init__(self, bindings: Bindings, context: int, window_tokens: int, is_recurrent: bool) -> None:
        self._bindings, self._context = bindings, context
        self._memory = bindings.llama_get_memory(context)
        self._window_tokens, self._is_recurrent = window_tokens, is_recurrent

    @property
    def has_positions_only(self) -> bool:
        """Whether every layer keeps every position, so that all cells are alike."""
        return self._window_tokens == 0 and not self._is_recurrent

    def clear(self) -> None:
        """Forget all sequences."""
        self._bindings.llama_memory_clear(self._memory, False)

    def length(self, sequence: int) -> int:
        """Tokens that llama.cpp holds for ``sequence``."""
        return int(self._bindings.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Forget positions ``start`` to ``end`` (exclusive, -1: all). False: refused, nothing changed."""
        return bool(self._bindings.llama_memory_seq_rm(self._memory, sequence, start, end))

    def share(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let ``target`` hold these positions of ``source`` too; nothing is copied."""
        self._bindings.llama_memory_seq_cp(self._memory, source, target, start, end)

    def can_cut(self, sequence: int, length: int) -> bool:
        """Whether everything that position ``length``, before the end, looks back at is still there.

        Source: llama.cpp's ``server-context.cpp``, the check of ``pos_min`` before it reuses a prefix.
        """
        if self._is_recurrent:
            return False
        if self._window_tokens == 0:
            return True
        first = self._bindings.llama_memory_seq_pos_min(self._memory, sequence)
        return bool(first == 0 or 0 < first < length - self._window_tokens)

    def save(self, sequence: int, num_head_bytes: int = 0) -> ctypes.Array[ctypes.c_uint8]:
        """A copy of everything that ``sequence`` holds, behind so many bytes that are left free."""
        size = self._bindings.llama_state_seq_get_size(self._context, sequence)
        data: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * (num_head_bytes + size))()
        body = (ctypes.c_uint8 * size).from_buffer(data, num_head_bytes)
        if self._bindings.llama_state_seq_get_data(self._context, body, size, sequence) != size:
            raise RunnerError("llama.cpp could not save a sequence")
        return data

    def restore(self, sequence: int, data: ctypes.Array[ctypes.c_uint8]) -> None:
        """Let ``sequence`` hold what was saved, in the first empty cells from the head on."""
        if not self._bindings.llama_state_seq_set_data(self._context, data, len(data), sequence):
            raise RunnerError("llama.cpp could not restore a sequence")
