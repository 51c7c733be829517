"""Places of checkpoints: the lengths at which a model whose state cannot be cut keeps a copy of it.

Used by the scheduler, which ends a span at each place. A checkpoint serves the requests that begin alike: the next turn
and another choice or question diverge at the border of a message. Does not know runners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["INTERVAL_TOKENS", "choose_places", "last_place", "next_place"]

INTERVAL_TOKENS = 2048
"""Distance of the checkpoints in long texts without borders."""

_MIN_TOKENS = 16
"""Tokens that a checkpoint saves at least: a span more takes about as long as computing so many."""


def choose_places(borders: Sequence[int], num_prompt_tokens: int) -> tuple[int, ...]:
    """Return the places in a prompt, ascending: where its first messages end, and where its last one begins and ends.

    What comes after the last message (the beginning of the answer) may differ in the next turn. A prompt without such
    an end has a place before its last token, so that its other choices compute this token alone.

    Args:
        borders: lengths at which the text of a message begins and ends, in turn; empty if the prompt has no messages.
        num_prompt_tokens: length of the prompt.
    """
    wanted = {*borders[2:3], *borders[-2:]}
    if not any(num_prompt_tokens - INTERVAL_TOKENS < border < num_prompt_tokens for border in borders[-1:]):
        wanted.add(num_prompt_tokens - 1)
    places: list[int] = []
    for place in sorted((place for place in wanted if _MIN_TOKENS <= place < num_prompt_tokens), reverse=True):
        if not places or places[-1] - place >= _MIN_TOKENS:
            places.append(place)
    return tuple(reversed(places))


def next_place(places: Sequence[int], length: int) -> int:
    """Return the first place after ``length``."""
    at_interval = (length // INTERVAL_TOKENS + 1) * INTERVAL_TOKENS
    index = bisect_right(places, length)
    return min(places[index], at_interval) if index < len(places) else at_interval


def last_place(places: Sequence[int], length: int) -> int:
    """Return the last place at or before ``length``; 0 if there is none."""
    at_interval = length // INTERVAL_TOKENS * INTERVAL_TOKENS
    index = bisect_right(places, length)
    return max(places[index - 1], at_interval) if index else at_interval
