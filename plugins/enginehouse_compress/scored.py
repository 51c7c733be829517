"""Method ``scored``: keeps the sentences that are most informative by a model's probabilities.

With a question, a sentence's score is how probable it makes the question: ``log p(question | sentence)``. Up to a
constant this is the pointwise mutual information of the two, and so equals how much more probable the question makes
the sentence (``log p(sentence | question) - log p(sentence)``), but takes one pass instead of two. Without a question,
the score is the sentence's own information per token, given the preceding text of its chunk.

Source: LongLLMLingua (Jiang et al., 2024) ranks documents by the perplexity of the question after them; here the units
are sentences, and tokens within them are never removed.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.selection import Rating, keep_most_relevant

__all__ = ["ScoredCompressor"]

_MAX_QUESTION_CHARS = 600  # its end, where a long text states its request
_MAX_SENTENCE_CHARS = 1200
_BEFORE_QUESTION = "\nQuestion: "
_BY_QUESTION = "mean log-probability of the question after this sentence"
_BY_INFORMATION = "mean information of its tokens, given the text before"


class ScoredCompressor:
    """Implements :class:`enginehouse.contract.compressor.Compressor`."""

    name = "scored"
    api_version = 1
    is_budgeted = True
    is_idempotent = True
    needs_scores = True

    def __init__(self, options: CompressOptions) -> None:
        self._options = options

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """See the contract."""

        def rate(sentences: Sequence[str]) -> Sequence[Rating]:
            question = task.question[-_MAX_QUESTION_CHARS:].strip()
            if question:
                return [Rating(score, _BY_QUESTION) for score in _by_question(sentences, question, tools)]
            scores = _by_information(sentences, self._options.chunk_chars, tools)
            return [Rating(score, _BY_INFORMATION) for score in scores]

        return keep_most_relevant(task, tools, rate)


def _by_question(sentences: Sequence[str], question: str, tools: CompressionTools) -> list[float]:
    """Mean log-probability of the question's tokens after each sentence."""
    different = list(dict.fromkeys(sentences))
    scored = tools.score(
        [(f"\n{sentence[:_MAX_SENTENCE_CHARS]}{_BEFORE_QUESTION}", question) for sentence in different]
    )
    rates = {
        sentence: sum(token.logprob for token in tokens) / max(1, len(tokens))
        for sentence, tokens in zip(different, scored, strict=True)
    }
    return [rates[sentence] for sentence in sentences]


def _by_information(sentences: Sequence[str], chunk_chars: int, tools: CompressionTools) -> list[float]:
    """Mean self-information of each sentence's tokens, after the preceding ones of its chunk."""
    chunks: list[list[str]] = []
    size = 0
    for sentence in sentences:
        if not chunks or size + len(sentence) > chunk_chars:
            chunks.append([])
            size = 0
        chunks[-1].append(sentence[:_MAX_SENTENCE_CHARS])
        size += len(chunks[-1][-1]) + 1
    scored = tools.score([("\n", " ".join(chunk)) for chunk in chunks])
    rates: list[float] = []
    for chunk, tokens in zip(chunks, scored, strict=True):
        start = 0
        for sentence in chunk:
            end = start + len(sentence)
            own = [-token.logprob for token in tokens if start < token.end <= end]
            rates.append(sum(own) / len(own) if own else 0.0)
            start = end + 1
    return rates
