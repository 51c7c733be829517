"""Method ``semantic``: keeps the sentences whose embeddings are near the question's, independent of its words.

Sentences are taken one after the other by maximal marginal relevance: similarity to the question, less similarity to
what was taken before, so that ten sentences that say the same do not displace one that says something else. A sentence
beside a better one gets a share of the difference, because it often names what the other one only calls "it" or "she".
The mean of all sentences is subtracted before they are compared with the question: else what they have in common, such
as their language, outweighs how they differ. Without a question, that mean takes its place.

Source: Carbonell and Goldstein, "The use of MMR, diversity-based reranking for reordering documents and producing
summaries" (SIGIR 1998), https://doi.org/10.1145/290941.291025. Subtracting the mean: Mu and Viswanath,
"All-but-the-Top" (ICLR 2018), who also remove the first principal components. The share of neighbours is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range
from enginehouse_compress.selection import Rating, keep_most_relevant
from enginehouse_compress.sentences import split_sentences
from enginehouse_compress.units import split_units

__all__ = ["SemanticCompressor"]

_RELEVANCE = 0.8
"""Weight of relevance; the rest is that of diversity. See docs/compression.md for what was measured."""
_NEIGHBOUR = 0.5
_MAX_COMPARED = 1000  # units to which the others are compared, so that time grows with the text and no faster
_MAX_QUESTION_CHARS = 600  # its end, where a long text states its request
_BY_QUESTION = "similarity to the question, less similarity to sentences that rank higher"
_BY_CENTRALITY = "similarity to the whole text, less similarity to sentences that rank higher"


class SemanticCompressor:
    """Implements :class:`enginehouse.contract.compressor.Compressor`."""

    name = "semantic"
    api_version = 1
    is_budgeted = True
    is_idempotent = True
    needs_scores = False
    needs_embeddings = True

    def compress(self, task: CompressionTask, tools: CompressionTools) -> Sequence[Sequence[Range]]:
        """See the contract."""
        question = task.question[-_MAX_QUESTION_CHARS:].strip()
        return keep_most_relevant(task, tools, lambda units: _rate(units, question, tools), split_units)


def _rate(units: Sequence[str], question: str, tools: CompressionTools) -> list[Rating]:
    if not units:
        return []
    sentences = [[unit[start:end] for start, end in split_sentences(unit)] for unit in units]
    different = list(dict.fromkeys(one for of_unit in sentences for one in of_unit))
    rows = tools.embed(different)  # (num_different, d)
    middle = rows.mean(axis=0)
    if question:
        aim = _normalized(tools.embed([question], "query")[0] - middle)
        rows = _normalized(rows - middle)
    else:
        aim = _normalized(middle)
    similarity = rows @ aim
    places = {sentence: place for place, sentence in enumerate(different)}
    best = [max((places[one] for one in of_unit), key=similarity.__getitem__) for of_unit in sentences]
    scores = _by_marginal_relevance(rows, np.array(best), _with_neighbours(similarity[best]))
    reason = _BY_QUESTION if question else _BY_CENTRALITY
    return [Rating(float(score), reason) for score in scores]


def _normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows with length 1, in the same shape; rows of length 0 stay."""
    lengths = np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-6))
    scaled: NDArray[np.float32] = rows / lengths
    return scaled


def _with_neighbours(similarity: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the relevance of each unit, (num_units,)."""
    near = similarity.copy()
    near[1:] = np.maximum(near[1:], similarity[:-1])
    near[:-1] = np.maximum(near[:-1], similarity[1:])
    relevance: NDArray[np.float32] = similarity + _NEIGHBOUR * (near - similarity)
    return relevance


def _by_marginal_relevance(
    rows: NDArray[np.float32], places: NDArray[np.int_], relevance: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the marginal relevance that each unit has when its turn comes, (num_units,).

    Args:
        rows: ``(num_rows, d)``, of length 1.
        places: ``(num_units,)``, the row of each unit; of units with the same row, all but the best only repeat it.
        relevance: ``(num_units,)``.
    """
    order = np.argsort(-relevance, kind="stable")
    used, first = np.unique(places[order], return_index=True)
    first = order[first]
    rows, most = rows[used], _RELEVANCE * relevance[first]
    scores = most.copy()
    is_left = np.ones(len(rows), np.bool_)
    repeated = np.zeros(len(rows), np.float32)  # similarity to the nearest unit taken, at least 0
    for _ in range(min(len(rows), _MAX_COMPARED)):
        taken = int(np.argmax(np.where(is_left, scores, -np.inf)))
        is_left[taken] = False
        repeated = np.maximum(repeated, rows @ rows[taken])
        scores = np.where(is_left, most - (1 - _RELEVANCE) * repeated, scores)
    of_units: NDArray[np.float32] = _RELEVANCE * relevance - (1 - _RELEVANCE)
    of_units[first] = scores
    return of_units
