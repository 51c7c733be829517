"""Method ``scored``: whole sentences that a model finds informative, by the probabilities that it gives to texts.

With a question, a sentence matters as much as it makes the question more probable: ``log p(question | sentence)``. Up
to a constant that is the information which the two have in common, and so the same as how much more probable the
question makes the sentence (``log p(sentence | question) - log p(sentence)``), but one pass gives it instead of two.
Without a question a sentence matters by its own information per token, given what stands before it in its chunk.

Source: LongLLMLingua (Jiang et al., 2024) ranks documents by the perplexity of the question behind them; here they are
sentences, and tokens inside of these never go.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.selection import keep_most_relevant

__all__ = ["ScoredCompressor"]

_MAX_QUESTION_CHARS = 600  # its end, where a long text says what it wants
_MAX_SENTENCE_CHARS = 1200
_BEFORE_QUESTION = "\nQuestion: "


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

        def rate(sentences: Sequence[str]) -> Sequence[float]:
            question = task.question[-_MAX_QUESTION_CHARS:].strip()
            if question:
                return _by_question(sentences, question, tools)
            return _by_information(sentences, self._options.chunk_chars, tools)

        return keep_most_relevant(task, tools, rate)


def _by_question(sentences: Sequence[str], question: str, tools: CompressionTools) -> list[float]:
    """Mean log-probability of the question's tokens behind each sentence."""
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
    """Mean self-information of each sentence's tokens, behind the others of its chunk."""
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
