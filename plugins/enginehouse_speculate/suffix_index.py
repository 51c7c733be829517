"""Finds the longest match of the last tokens of a text in another text, or earlier in the same.

Appending a token takes constant time. Knows only token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from enginehouse.contract.drafter import NUM_GRADES

__all__ = ["Match", "SuffixIndex", "grade_of"]

_NUM_PLACES = 8  # number of last positions compared for each short run of tokens
_LONGEST_MATCH = 64


@frozen
class Match:
    """The text continues at ``place``, before which ``length`` tokens agree."""

    place: int
    length: int


@define(eq=False)
class SuffixIndex:
    """Index of a text, searchable for the end of another one.

    Attributes:
        min_match: minimum number of tokens that must agree.
        token_ids: the text so far.
    """

    min_match: int
    token_ids: list[int] = field(factory=list)
    _places: dict[tuple[int, ...], list[int]] = field(factory=dict)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            text = self.token_ids
            if len(text) >= self.min_match:  # the tokens before this one can be continued from now on
                places = self._places.setdefault(tuple(text[-self.min_match :]), [])
                places.append(len(text))
                if len(places) > _NUM_PLACES:
                    del places[0]
            text.append(token_id)

    def find(self, end: Sequence[int]) -> Match | None:
        """Return the position after the longest match of the end of ``end``; of equal ones, the last."""
        if len(end) < self.min_match:
            return None
        best = Match(0, 0)
        for place in reversed(self._places.get(tuple(end[-self.min_match :]), ())):
            length = self._length(place, end)
            if length > best.length:
                best = Match(place, length)
        return best if best.length else None

    def after(self, place: int, num_tokens: int) -> list[int]:
        """Return at most ``num_tokens`` tokens from ``place`` on."""
        return self.token_ids[place : place + num_tokens]

    def _length(self, place: int, end: Sequence[int]) -> int:
        text, longest = self.token_ids, min(place, len(end), _LONGEST_MATCH)
        length = self.min_match
        while length < longest and text[place - length - 1] == end[-length - 1]:
            length += 1
        return length


def grade_of(num_agreed: int) -> int:
    """Confidence grade of a continuation after ``num_agreed`` matching tokens: one more for each doubling."""
    return min(NUM_GRADES - 1, max(0, num_agreed.bit_length() - 1))
