"""Places of checkpoints: the lengths at which a model whose state cannot be cut keeps a copy of it.

Used by the scheduler, which ends a span at each place. A checkpoint serves requests that begin alike: the next turn,
another choice or another question diverges at the boundary of a message. Does not know runners or templates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer

__all__ = ["INTERVAL_TOKENS", "choose_places", "last_place", "next_place"]

INTERVAL_TOKENS = 2048
"""Distance of the checkpoints in texts without boundaries; it is doubled until a prompt has at most eight of them.

All sequences share the memory of checkpoints, and a long prompt would take that of all others.
"""

_MAX_AT_INTERVALS = 8
_MAX_OPENING_TOKENS = 32
_MIN_TOKENS = 16
"""Tokens that a checkpoint saves at least: a span more takes about as long as computing so many."""


def choose_places(prompt: NDArray[np.int32], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the places in a prompt, ascending: where its first messages end, and where its last one begins and ends.

    Messages end with an end token; in a prompt without any they begin with a control token. What comes after the last
    message is the beginning of the answer, which may differ in the next turn. If it is too long for that, there is a
    place before the last token, so that other choices compute this token alone.

    Args:
        prompt: (num_prompt_tokens,) int32; ids of images are negative.
        tokenizer: tokenizer of the model.
    """
    boundaries = 1 + np.flatnonzero(np.isin(prompt, list(tokenizer.end_token_ids)))
    if not len(boundaries):
        boundaries = np.flatnonzero(np.isin(prompt, list(tokenizer.control_token_ids)))[1:]
    if not len(boundaries) or not len(prompt) - _MAX_OPENING_TOKENS <= boundaries[-1] < len(prompt):
        boundaries = np.append(boundaries[boundaries < len(prompt) - 1], len(prompt) - 1)
    places: list[int] = []
    for boundary in boundaries[::-1].tolist():
        if boundary >= _MIN_TOKENS and (not places or places[-1] - boundary >= _MIN_TOKENS):
            places.append(boundary)
    return tuple(places[::-1]) if len(places) <= 3 else (places[-1], places[1], places[0])


def _interval_of(num_prompt_tokens: int) -> int:
    interval = INTERVAL_TOKENS
    while num_prompt_tokens // interval > _MAX_AT_INTERVALS:
        interval *= 2
    return interval


def next_place(places: Sequence[int], length: int, num_prompt_tokens: int) -> int:
    """Return the first place after ``length``, in a prompt of ``num_prompt_tokens`` tokens or the answer to it."""
    interval = _interval_of(num_prompt_tokens)
    at_interval = (length // interval + 1) * interval
    index = bisect_right(places, length)
    return min(places[index], at_interval) if index < len(places) else at_interval


def last_place(places: Sequence[int], length: int, num_prompt_tokens: int) -> int:
    """Return the last place at or before ``length``, see :func:`next_place`; 0 if there is none."""
    interval = _interval_of(num_prompt_tokens)
    at_interval = length // interval * interval
    index = bisect_right(places, length)
    return max(places[index - 1], at_interval) if index else at_interval
