"""How much sentences have to do with a question, by the words that they share: BM25 of the library bm25s.

Where a question shares no word with a sentence, the rarity of the sentence's own words decides: what is said nowhere
else in a document is the greater loss.
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
_RARITY = 0.05  # of the highest score, so that it only decides between sentences that the question says little about
_NEIGHBOUR = 0.1  # share of a sentence's score that its neighbours get: what stands beside an answer belongs to it


def is_bm25_installed() -> bool:
    """Whether the extra is there."""
    return all(importlib.util.find_spec(name) is not None for name in (BM25_LIBRARY, "Stemmer"))


def rate_by_words(sentences: Sequence[str], question: str, language: str) -> Sequence[float]:
    """A score for each sentence; equal for equal ones.

    Args:
        language: that the stemmer knows, such as ``english``.
    """
    import Stemmer  # noqa: PLC0415 - the extra may not be there

    stemmer = Stemmer.Stemmer(language, 0)  # one per call: it is not to be used by two threads at once
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
    """(num_sentences,) float, 0 to 1: how rare the words of each sentence are on average."""
    counts = Counter(word for sentence in words for word in set(sentence))
    most = math.log(1 + len(words))
    rarities = []
    for sentence in words:
        different = dict.fromkeys(sentence)  # in order, so that sums are the same everywhere
        total = sum(math.log((1 + len(words)) / counts[word]) for word in different)
        rarities.append(total / len(different) / most if different else 0.0)
    return np.array(rarities)
