"""OpenAI's `prediction`: the predicted output of a request, and how much of it appears in the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter

__all__ = ["MIN_RUN", "PredictionCount", "check_prediction", "find_ignored_in_prediction", "read_prediction"]


def read_prediction(value: Any) -> str | None:
    """The predicted text; None without one. Parts follow each other without a separator.

    Raises:
        InvalidRequest: it has another form than OpenAI's.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("prediction: must be an object", "prediction")
    if value.get("type") != "content":
        raise InvalidRequest("prediction.type: must be 'content'", "prediction.type")
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of text parts", path)
    return "".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def check_prediction(**others: bool) -> None:
    """Check what else the request asks for: field name to whether it asks for what no prediction can go with.

    Raises:
        UnsupportedParameter: something does.
    """
    wrong = next((name for name, asks in others.items() if asks), None)
    if wrong is not None:
        raise UnsupportedParameter(f"prediction: not supported together with {wrong}", "prediction")


def find_ignored_in_prediction(value: Any) -> Iterator[str]:
    """Paths of unknown members."""
    if isinstance(value, Mapping):
        yield from (f"prediction.{name}" for name in value if name not in ("type", "content"))


def _read_part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{path}.type: must be 'text'", f"{path}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: must be a string", f"{path}.text")
    text: str = part["text"]
    return text


MIN_RUN = 4
"""Tokens that must agree before a prediction that was left is taken up again; fewer agree by chance."""


class PredictionCount:
    """Compares one answer with its prediction, in time linear in the answer.

    From its beginning the answer follows the prediction until they part. Then the prediction is taken up again at the
    next place that holds the answer's last :data:`MIN_RUN` tokens, and so on: tokens in such runs are accepted, those
    that were passed over are rejected.

    Args:
        token_ids: of the prediction.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._num_accepted = 0
        self._next = 0  # place in the prediction behind all that was accepted
        self._is_following = bool(token_ids)
        self._recent: deque[int] = deque(maxlen=MIN_RUN)  # of the answer, since the two parted
        self._places: dict[tuple[int, ...], list[int]] | None = None  # of each run, made when they part

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that the answer holds."""
        return self._num_accepted

    @property
    def num_rejected(self) -> int:
        """The other tokens of the prediction."""
        return len(self._token_ids) - self._num_accepted

    def push(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
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
        """Look for the answer's last tokens further on in the prediction."""
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
