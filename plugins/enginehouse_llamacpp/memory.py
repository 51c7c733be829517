"""Sequences in llama.cpp's memory: remove, share and measure, with the rules that models add.

Three kinds of memory behave differently. A full KV cache can be cut anywhere. A sliding-window cache may have lost
positions before the window, and llama.cpp still says yes to a cut that needs them. A recurrent state (Mamba and
hybrids) knows only its newest position.
"""

from __future__ import annotations

from enginehouse_llamacpp.library import Bindings

__all__ = ["SequenceMemory"]


class SequenceMemory:
    """The memory of one ``llama_context``; sequences are llama.cpp's ids.

    Args:
        window_tokens: size of the model's sliding window; 0: it has none.
        is_recurrent: some layers keep a state instead of positions.
    """

    def __init__(self, bindings: Bindings, context: int, window_tokens: int, is_recurrent: bool) -> None:
        self._bindings = bindings
        self._memory = bindings.llama_get_memory(context)
        self._window_tokens = window_tokens
        self._is_recurrent = is_recurrent

    def clear(self) -> None:
        """Forget all sequences."""
        self._bindings.llama_memory_clear(self._memory, True)

    def length(self, sequence: int) -> int:
        """Tokens that llama.cpp holds for ``sequence``."""
        return int(self._bindings.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def remove(self, sequence: int) -> None:
        """Forget a whole sequence; always works."""
        self._bindings.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def truncate(self, sequence: int, length: int) -> int:
        """Keep the first ``length`` tokens of a longer sequence; the length really kept, ``length`` or 0."""
        if length and self._can_cut(sequence, length):
            if self._bindings.llama_memory_seq_rm(self._memory, sequence, length, -1):
                return length
        self.remove(sequence)
        return 0

    def share(self, source: int, target: int, length: int, source_length: int) -> int:
        """Let the empty ``target`` begin with ``length`` tokens of ``source``; the length really shared."""
        if length == 0 or (length < source_length and not self._can_cut(source, length)):
            return 0
        self._bindings.llama_memory_seq_cp(self._memory, source, target, 0, length)
        return length

    def _can_cut(self, sequence: int, length: int) -> bool:
        """Whether everything that position ``length`` looks at is still there.

        Source: llama.cpp's ``server-context.cpp``, the check of ``pos_min`` before it reuses a prefix.
        """
        if self._is_recurrent:
            return False
        if self._window_tokens == 0:
            return True
        first = self._bindings.llama_memory_seq_pos_min(self._memory, sequence)
        return first == 0 or 0 < first < length - self._window_tokens
