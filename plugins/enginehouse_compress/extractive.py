"""Method ``extractive``: whole sentences that share words with the question. Does not use model probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.relevance import rate_by_words
from enginehouse_compress.selection import Rating, keep_most_relevant

__all__ = ["ExtractiveCompressor"]

_REASON = "words shared with the question (BM25), and a little for rare words"


class ExtractiveCompressor:
    """Implements :class:`enginehouse.contract.compressor.Compressor`."""

    name = "extractive"
    api_version = 1
    is_budgeted = True
    is_idempotent = True
    needs_scores = False

    def __init__(self, options: CompressOptions) -> None:
        self._options = options

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """See the contract."""
        language = self._options.language

        def rate(sentences: Sequence[str]) -> Sequence[Rating]:
            scores = rate_by_words(sentences, task.question, language)
            return [Rating(score, _REASON) for score in scores]

        return keep_most_relevant(task, tools, rate)
