"""Relevance of sentences to a question by shared words: BM25 of the library bm25s.

If the question shares no words with a sentence, the rarity of the sentence's own words decides: information that occurs
only once in a document is the greater loss.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

__all__ = ["BM25_LIBRARY", "is_bm25_installed", "rate_by_words"]

BM25_LIBRARY = "bm25s"

_WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\\W_]+(?:['\u2019][^\\W\\d_]+)?")
_COMMON = """
a an and are as at be been by can could did do does for from had has have how in is it its of on or should than that the
their them there these they this to was were what when where which who whom whose why will with would you
"""
_QUESTION_WORDS = frozenset(_COMMON.split())
_RARITY = 0.05  # of the highest score, so that it only ranks sentences with few words of the question
_NEIGHBOUR = 0.1  # share of a sentence's score added to its neighbours: text next to an answer is relevant to it


def is_bm25_installed() -> bool:
    """True if the extra is installed."""
    return all(importlib.util.find_spec(name) is not None for name in (BM25_LIBRARY, "Stemmer"))


def rate_by_words(sentences: Sequence[str], question: str, language: str) -> Sequence[float]:
    """Return a score for each sentence; equal for equal sentences.

    Args:
        language: a language that the stemmer supports, such as ``english``.
    """
    import Stemmer  # noqa: PLC0415 - the extra may not be there

    stemmer = Stemmer.Stemmer(language, 0)  # one per call: not thread-safe
    words = [stemmer.stemWords(_words(sentence)) for sentence in sentences]
    asked = stemmer.stemWords([word for word in _words(question) if word not in _QUESTION_WORDS])
    matching = _bm25(words, asked)
    rarity = _rarity(words)
    scale = float(matching.max(initial=0.0)) or 1.0
    near = np.zeros_like(matching)
    near[:-1] += matching[1:]
    near[1:] += matching[:-1]
    scores = matching + _NEIGHBOUR * near + _RARITY * scale * rarity
    return [float(score) for score in scores]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _bm25(words: Sequence[Sequence[str]], asked: Sequence[str]) -> np.ndarray:
    """(num_sentences,) float: BM25 of the question's words."""
    import bm25s  # noqa: PLC0415 - the extra may not be there

    known = {word for sentence in words for word in sentence}
    asked = [word for word in asked if word in known]
    if not asked:
        return np.zeros(len(words))
    index = bm25s.BM25()
    index.index([list(sentence) for sentence in words], show_progress=False)
    return np.asarray(index.get_scores(asked), dtype=np.float64)


def _rarity(words: Sequence[Sequence[str]]) -> np.ndarray:
    """(num_sentences,) float, 0 to 1: mean rarity of the words of each sentence."""
    counts = Counter(word for sentence in words for word in set(sentence))
    most = math.log(1 + len(words))
    rarities = []
    for sentence in words:
        different = dict.fromkeys(sentence)  # ordered, so that sums are reproducible
        total = sum(math.log((1 + len(words)) / counts[word]) for word in different)
        rarities.append(total / len(different) / most if different else 0.0)
    return np.array(rarities)
