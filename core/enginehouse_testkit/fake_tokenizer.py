"""Vocabulary of the fake model: bytes, a few pieces of text, control tokens.

It is small, but covers the cases that break servers: characters split over tokens, tokens that combine half a character
with whole ones, tokens inside which a stop string begins, several end tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

__all__ = ["CONTROL_TOKENS", "END_TOKENS", "PIECES", "FakeTokenizer"]

PIECES: tuple[bytes, ...] = (
    *(b" the", b" and", b" of", b" to", b" stop", b" a", b" in", b"ing", b"tion", b"st", b"op", b"he", b"ll", b"er"),
    *(b"on", b"mountain", b"eering", b"\n\n", b". ", b", "),
    *("é".encode(), "ß".encode(), "日".encode(), "本".encode(), "語".encode(), "🙂".encode(), "日本".encode()),
    *(b"\xf0\x9f", b"\x98\x80", b" \xe2"),
)
"""Tokens of more than one byte; the last three contain parts of characters."""

CONTROL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|eos|>")
END_TOKENS = ("<|im_end|>", "<|eos|>")


class FakeTokenizer:
    """Longest match over bytes. Ids: 0-255 the bytes, then ``PIECES``, then ``CONTROL_TOKENS``, then unused ids.

    Args:
        vocab_size: at least the number of tokens above; further ids are ``<unused-N>``, never encoded.
        abort_at_text: encoding a text that contains it ends the process, as a crash of a library in C would.
    """

    def __init__(self, vocab_size: int | None = None, abort_at_text: str | None = None) -> None:
        self._abort_at_text = abort_at_text
        tokens = [bytes([value]) for value in range(256)] + list(PIECES)
        first_control = len(tokens)
        tokens += [name.encode() for name in CONTROL_TOKENS]
        self.vocab_size = len(tokens) if vocab_size is None else vocab_size
        if self.vocab_size < len(tokens):
            raise ValueError(f"the fake vocabulary has at least {len(tokens)} tokens, not {vocab_size}")
        unused = range(len(tokens), self.vocab_size)
        self.token_bytes: Sequence[bytes] = (*tokens, *(b"<unused-%d>" % token_id for token_id in unused))
        self.special_tokens: Mapping[str, int] = {
            name: first_control + index for index, name in enumerate(CONTROL_TOKENS)
        }
        self.control_token_ids = frozenset(self.special_tokens.values()) | frozenset(unused)
        self.end_token_ids = frozenset(self.special_tokens[name] for name in END_TOKENS)
        self.prefix_token_ids: tuple[int, ...] = (self.special_tokens["<|bos|>"],)
        self.max_bytes_per_token: int | None = max(map(len, self.token_bytes))
        self._piece_ids = {piece: 256 + index for index, piece in enumerate(PIECES)}
        self._pieces = re.compile(b"|".join(map(re.escape, sorted(PIECES, key=len, reverse=True))) + b"|.", re.DOTALL)
        self._controls = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")

    def encode(self, text: str, special: bool) -> list[int]:
        """See :class:`enginehouse.contract.backend.Tokenizer`."""
        if self._abort_at_text is not None and self._abort_at_text in text:
            os.abort()
        if not special:
            return self._encode_bytes(text.encode())
        token_ids: list[int] = []
        for part in self._controls.split(text):
            if part in self.special_tokens:
                token_ids.append(self.special_tokens[part])
            else:
                token_ids += self._encode_bytes(part.encode())
        return token_ids

    def _encode_bytes(self, data: bytes) -> list[int]:
        return [self._piece_ids.get(piece, piece[0]) for piece in self._pieces.findall(data)]
