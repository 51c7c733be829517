"""Converts a model's tokenizer to the library's, from the bytes of each token: the same for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import MissingDependency

try:
    from llguidance import LLTokenizer, TokenizerWrapper
except ImportError as error:
    raise MissingDependency("llguidance", "llguidance") from error

__all__ = ["build_vocabulary"]


class _TokenBytes:
    """Tokenizer interface required by the library: bytes of all tokens, special ids, and an encode function."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens: Sequence[bytes] = list(tokenizer.token_bytes)
        self.special_token_ids = sorted(tokenizer.control_token_ids | tokenizer.end_token_ids)
        self.eos_token_id = min(tokenizer.end_token_ids, default=None)
        self.bos_token_id = None
        self.greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        # The library tries bytes first and takes an exception as "strings only".
        if not isinstance(text, str):
            raise TypeError("text is encoded, bytes are not")
        token_ids = self._tokenizer.encode(text, special=False)
        if self.greedy is not None and b"".join(self.tokens[token_id] for token_id in token_ids) != text.encode():
            return self.greedy(text)  # the tokenizer prepends a space or normalises
        return token_ids


def build_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Build the vocabulary with all end tokens; control tokens are never part of constrained text."""
    wrapped = _TokenBytes(tokenizer)
    vocabulary = LLTokenizer(TokenizerWrapper(wrapped), eos_token=sorted(tokenizer.end_token_ids))
    wrapped.greedy = vocabulary.greedy_tokenize
    return vocabulary
