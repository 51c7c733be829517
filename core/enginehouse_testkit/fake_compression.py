"""Compression tools without a model: words are tokens, and a text is probable after words that it shares."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from enginehouse.contract.compressor import ScoredToken

__all__ = ["FakeCompressionTools"]

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]", re.DOTALL)


class FakeCompressionTools:
    """Implements :class:`enginehouse.contract.compressor.CompressionTools`.

    Attributes:
        num_scored: tokens that were scored.
    """

    def __init__(self) -> None:
        self.num_scored = 0

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count words, runs of white space and other characters."""
        return [len(_TOKEN.findall(text)) for text in texts]

    def token_ends(self, text: str) -> list[int]:
        """Return their end positions."""
        return [match.end() for match in _TOKEN.finditer(text)]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        """Score tokens: those in the preceding text are probable; for others it depends on their type."""
        return [self._score(before, text) for before, text in pairs]

    def _score(self, before: str, text: str) -> list[ScoredToken]:
        assert before, "the text before another one must not be empty"
        seen = set(_TOKEN.findall(before.lower()))
        tokens = []
        for match in _TOKEN.finditer(text):
            word = match.group().lower()
            rare = 2.0 + zlib.crc32(word.encode("utf-8", "replace")) % 1000 / 200
            tokens.append(ScoredToken(match.end(), -0.5 if word in seen else -rare))
        self.num_scored += len(tokens)
        return tokens
