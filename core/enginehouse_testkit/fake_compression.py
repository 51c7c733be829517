"""Compression tools without a model: words are tokens, a text is probable after words that it shares, and texts with
common words have similar embeddings.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.compressor import Range, ScoredToken

__all__ = ["FakeCompressionTools"]

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]", re.DOTALL)


class FakeCompressionTools:
    """Implements :class:`enginehouse.contract.compressor.CompressionTools`.

    Attributes:
        num_scored: tokens that were scored.
        explained: what was explained: index of the text, part, reason and score.
    """

    def __init__(self) -> None:
        self.num_scored = 0
        self.explained: list[tuple[int, Range, str, float | None]] = []

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count words, runs of white space and other characters."""
        return [len(_TOKEN.findall(text)) for text in texts]

    def token_ends(self, text: str) -> list[int]:
        """Return their end positions."""
        return [match.end() for match in _TOKEN.finditer(text)]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        """Score tokens: those in the preceding text are probable; for others it depends on their type."""
        return [self._score(before, text) for before, text in pairs]

    def embed(self, texts: Sequence[str], role: Literal["query", "document"] = "document") -> NDArray[np.float32]:
        """Return embeddings of 64 numbers: the sum of a random direction for each word."""
        return np.array([_embedding(text) for text in texts], np.float32).reshape(len(texts), 64)

    def explain(self, text: int, part: Range, reason: str, score: float | None = None) -> None:
        """Keep it."""
        self.explained.append((text, part, reason, score))

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


def _embedding(text: str) -> NDArray[np.float64]:
    words = [zlib.crc32(word.lower().encode("utf-8", "replace")) for word in _WORD.findall(text)]
    total = np.ones(64)
    for word in words:
        total += 4 * _direction(word)
    normalized: NDArray[np.float64] = total / np.linalg.norm(total)
    return normalized


@lru_cache(4096)
def _direction(word: int) -> NDArray[np.float64]:
    return np.random.default_rng(word).standard_normal(64)
