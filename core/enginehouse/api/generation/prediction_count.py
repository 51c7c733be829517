"""Counts the part of a predicted output that was generated."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

MIN_RUN = 4
"""Number of tokens that must match before the prediction is followed again; fewer may match by chance."""


class PredictionCount:
    """Compares one completion with its prediction, in time linear in the completion.

    The completion follows the prediction from its beginning until they diverge. The prediction is followed again from
    the next position that has the completion's last :data:`MIN_RUN` tokens, and so on: tokens in such runs are
    accepted, skipped ones are rejected.

    Args:
        token_ids: of the prediction.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._num_accepted = 0
        self._next = 0  # position in the prediction after all accepted tokens
        self._is_following = bool(token_ids)
        self._recent: deque[int] = deque(maxlen=MIN_RUN)  # tokens of the completion since they diverged
        self._places: dict[tuple[int, ...], list[int]] | None = None  # positions of each run, built when they diverge

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that are in the completion."""
        return self._num_accepted

    @property
    def num_rejected(self) -> int:
        """The other tokens of the prediction."""
        return len(self._token_ids) - self._num_accepted

    def push(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the completion."""
        for token_id in token_ids:
            if self._is_following and self._next < len(self._token_ids):
                if self._token_ids[self._next] == token_id:
                    self._next += 1
                    self._num_accepted += 1
                    continue
                self._is_following = False
                self._recent.clear()
            self._search(token_id)

    def _search(self, token_id: int) -> None:
        """Search the rest of the prediction for the completion's last tokens."""
        self._recent.append(token_id)
        if len(self._recent) < MIN_RUN:
            return
        if self._places is None:
            self._places = _places_of_runs(self._token_ids)
        places = self._places.get(tuple(self._recent), ())
        at = bisect_left(places, self._next)
        if at < len(places):
            self._next = places[at] + MIN_RUN
            self._num_accepted += MIN_RUN
            self._is_following = True


def _places_of_runs(token_ids: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(token_ids) - MIN_RUN + 1):
        places.setdefault(token_ids[start : start + MIN_RUN], []).append(start)
    return places
