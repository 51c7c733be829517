"""Token ids of a GGUF vocabulary. Thread-safe: llama.cpp's tokenizer only reads, our tables never change."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from enginehouse_llamacpp.library import Bindings

__all__ = ["LlamaCppTokenizer"]


class LlamaCppTokenizer:
    """Implements :class:`enginehouse.backend.Tokenizer`; valid as long as the model is loaded.

    Tables are made once: asking llama.cpp per token would cost more than sampling.
    """

    def __init__(self, bindings: Bindings, vocab: int) -> None:
        self._bindings, self._vocab = bindings, vocab
        self.vocab_size: int = bindings.llama_vocab_n_tokens(vocab)
        self.token_bytes: Sequence[bytes] = self._read_token_bytes()
        control = self._read_control_ids()
        is_end = bindings.llama_vocab_is_eog
        self.end_token_ids = frozenset(token_id for token_id in range(self.vocab_size) if is_end(vocab, token_id))
        self.control_token_ids = frozenset(control) | self.end_token_ids
        self.special_tokens: Mapping[str, int] = {
            self.token_bytes[token_id].decode(errors="replace"): token_id for token_id in sorted(control)
        }
        bos = bindings.llama_vocab_bos(vocab)
        self.prefix_token_ids: tuple[int, ...] = (bos,) if bindings.llama_vocab_get_add_bos(vocab) and bos >= 0 else ()

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of ``text`` without prefix. Only with ``special`` are control-token strings control tokens."""
        if not text:
            return []
        data = text.encode(errors="replace")
        size = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = self._bindings.llama_tokenize(self._vocab, data, len(data), buffer, size, False, special)
            if count >= 0:
                return buffer[:count]
            size = -count

    def token_text(self, token_id: int) -> str:
        """Text of one id; empty for an id that does not exist."""
        return self.token_bytes[token_id].decode(errors="replace") if 0 <= token_id < self.vocab_size else ""

    def _read_token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of every id; control tokens by name."""
        to_piece, vocab = self._bindings.llama_token_to_piece, self._vocab
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token_id in range(self.vocab_size):
            length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            if length < 0:
                buffer = ctypes.create_string_buffer(-length)
                length = to_piece(vocab, token_id, buffer, len(buffer), 0, True)
            pieces.append(ctypes.string_at(buffer, length))
        return tuple(pieces)

    def _read_control_ids(self) -> list[int]:
        """Ids that llama.cpp forms from text only when asked to parse special tokens."""
        get_attributes, vocab = self._bindings.llama_vocab_get_attr, self._vocab
        mask = self._bindings.LLAMA_TOKEN_ATTR_CONTROL | self._bindings.LLAMA_TOKEN_ATTR_UNKNOWN
        return [token_id for token_id in range(self.vocab_size) if get_attributes(vocab, token_id) & mask]
