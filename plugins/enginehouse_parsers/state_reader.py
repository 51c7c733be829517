"""Base of the sessions: a state machine over text that arrives in pieces.

Each state is a method that reads from the front of the unread text and returns True if the next state can continue with
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["StateReader"]

_P = TypeVar("_P")


class StateReader(Generic[_P]):
    """The unread text, the parts that were read, and the state."""

    _state: Callable[[], bool]

    def __init__(self) -> None:
        self._rest = ""  # unread text
        self._num_white = 0  # number of leading white space characters seen so far
        self._parts: list[_P] = []

    def push(self, text: str) -> Sequence[_P]:
        """Read a piece of text; returns the parts that are certain."""
        self._rest += text
        self._read()
        return self._taken()

    def _read(self) -> None:
        while self._rest and self._state():
            pass

    def _taken(self) -> Sequence[_P]:
        """Return the parts since the last call."""
        parts, self._parts = self._parts, []
        return parts
