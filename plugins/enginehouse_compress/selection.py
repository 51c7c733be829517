"""Selects the highest-rated sentences that fit into the budget, counted in real tokens.

Some white space around removed sentences is kept: of the gaps between two kept sentences, the one with the most line
ends remains, so that paragraphs stay separate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from attrs import frozen

from enginehouse.contract.compressor import CompressionTask, CompressionTools, Range, cut
from enginehouse_compress.sentences import Part, split_sentences

__all__ = ["Rate", "Rating", "Sentence", "Split", "keep_everything", "keep_most_relevant"]

_MAX_SEPARATOR_CHARS = 2
_MAX_GAP_CHARS = 40  # between two kept sentences: no indentation is wider


@frozen
class Rating:
    """Relevance of a sentence, only compared with that of others, and what it is."""

    score: float
    reason: str


Rate = Callable[[Sequence[str]], Sequence[Rating]]
"""Rates each sentence."""

Split = Callable[[str, int, int], Sequence[Part]]
"""Splits a range of a text."""


@frozen
class Sentence:
    """A sentence that may be removed.

    Attributes:
        text: index of its text.
        area: index of the unprotected area of that text.
        part: its character range in the text.
        num_tokens: its number of tokens, including the white space after it.
    """

    text: int
    area: int
    part: Part
    num_tokens: int


def keep_everything(task: CompressionTask) -> list[list[Range]]:
    """Return ranges that keep all texts unchanged."""
    return [[(0, len(text.text))] if text.text else [] for text in task.texts]


def keep_most_relevant(
    task: CompressionTask, tools: CompressionTools, rate: Rate, split: Split = split_sentences
) -> list[list[Range]]:
    """Keep the sentences with the highest ratings from ``rate`` that fit into the budget.

    Of equally rated sentences, earlier ones are kept first. ``split`` may give larger parts than sentences.
    """
    if sum(tools.count_tokens([text.text for text in task.texts])) <= task.max_tokens:
        return keep_everything(task)
    sentences = _sentences(task, tools, split)
    rates = rate([task.texts[one.text].text[slice(*one.part)] for one in sentences])
    for sentence, rating in zip(sentences, rates, strict=True):
        tools.explain(sentence.text, sentence.part, rating.reason, rating.score)
    order = sorted(range(len(sentences)), key=lambda index: (-rates[index].score, index))
    protected = sum(tools.count_tokens([cut(text, ()) for text in task.texts]))
    chosen, num_left = [], task.max_tokens - protected
    for index in order:
        if sentences[index].num_tokens <= num_left:
            chosen.append(index)
            num_left -= sentences[index].num_tokens
    while True:
        kept = _ranges(task, sentences, set(chosen))
        texts = [cut(text, ranges) for text, ranges in zip(task.texts, kept, strict=True)]
        # Tokens at the cuts may be split differently now; the least relevant sentences are dropped to compensate.
        if not chosen or sum(tools.count_tokens(texts)) <= task.max_tokens:
            return kept
        del chosen[-max(1, len(chosen) // 50) :]


def _sentences(task: CompressionTask, tools: CompressionTools, split: Split) -> list[Sentence]:
    """Return all sentences outside of protected areas, in order."""
    found: list[Sentence] = []
    for number, text in enumerate(task.texts):
        ends = tools.token_ends(text.text)
        for area, (start, end) in enumerate(text.free()):
            parts = split(text.text, start, end)
            following = [*(part[0] for part in parts[1:]), end]
            for part, next_start in zip(parts, following, strict=False):
                num_tokens = bisect.bisect_right(ends, next_start) - bisect.bisect_right(ends, part[0])
                found.append(Sentence(number, area, part, max(1, num_tokens)))
    return found


def _ranges(task: CompressionTask, sentences: Sequence[Sentence], chosen: set[int]) -> list[list[Range]]:
    """Return the chosen sentences of each text and the white space to keep."""
    kept: list[list[Range]] = [[] for _ in task.texts]
    by_area: dict[tuple[int, int], list[int]] = {}
    for index, sentence in enumerate(sentences):
        by_area.setdefault((sentence.text, sentence.area), []).append(index)
    for number, text in enumerate(task.texts):
        for area, free in enumerate(text.free()):
            kept[number] += _of_area(
                text.text,
                free,
                [sentences[i] for i in by_area.get((number, area), ())],
                [i in chosen for i in by_area.get((number, area), ())],
            )
    return kept


def _of_area(text: str, free: Range, sentences: Sequence[Sentence], are_chosen: Sequence[bool]) -> list[Range]:
    """Return the ranges kept between two protected areas."""
    starts = [*(sentence.part[0] for sentence in sentences), free[1]]
    ends = [free[0], *(sentence.part[1] for sentence in sentences)]
    gaps = list(zip(ends, starts, strict=True))  # gap i is before sentence i, the last one after all
    ranges: list[Range] = []
    waiting: list[Range] = []
    for gap, sentence, is_chosen in zip(gaps, sentences, are_chosen, strict=False):
        waiting.append(gap)
        if is_chosen:
            ranges += [_separator(text, waiting), sentence.part]
            waiting = []
    ranges.append(_separator(text, [*waiting, gaps[-1]]))
    return [range_ for range_ in ranges if range_[0] < range_[1]]


def _separator(text: str, gaps: Sequence[Range]) -> Range:
    """Return the first gap with the most line ends; where something was removed, at most one empty line of it."""
    start, end = max(gaps, key=lambda gap: (text.count("\n", *gap), gap[1] > gap[0]))
    return start, min(end, start + (_MAX_GAP_CHARS if len(gaps) == 1 else _MAX_SEPARATOR_CHARS))
