"""Output of the reader of loose values: JSON, with commas and keys, as it becomes certain."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from attrs import define, frozen

__all__ = ["END_OF_MEMBER", "Container", "Member", "ValueWriter", "as_json", "read_json"]

_OTHER_WHITE = re.compile(r"[^ \t\n\r]")


@frozen
class Member:
    """Beginning of a member of the outermost object, see ``splits``."""

    name: str


END_OF_MEMBER = object()
"""End of such a member."""


@define
class Container:
    """An open container: its closing bracket as read and as written, and what it holds so far."""

    closer: str
    written: str
    is_object: bool
    is_call: bool = False  # keyword arguments in parentheses
    is_spread: bool = False  # its members belong to the container around it
    num_items: int = 0


class ValueWriter:
    """The containers that are open, and what is written of them.

    Args:
        positions: names of arguments in parentheses that are given without one.
        splits: hand the members of the outermost object out one by one.

    Attributes:
        out: what was written since this list was emptied by the caller.
    """

    def __init__(self, positions: tuple[str, ...], *, splits: bool) -> None:
        self.out: list[str | Member | object] = []
        self._positions, self._splits = positions, splits
        self._stack: list[Container] = []
        self._comma = False  # read, but not written
        self._gap: list[str] = []  # white space that waits for what follows
        self._key: list[str] | None = None  # JSON text of the key that is being read
        self._key_is_quoted = False
        self._doubt: list[str | Member | object] | None = None  # written since an end marker in a text
        self._num_positional = 0

    @property
    def _has_members(self) -> bool:
        """True if the innermost container has the members that are handed out one by one."""
        return self._splits and (len(self._stack) == 1 or (len(self._stack) == 2 and self._stack[-1].is_spread))

    def _emit(self, text: str) -> None:
        """Write a value, or a part of it."""
        if text:
            (self.out if self._doubt is None else self._doubt).append(text)

    def _bracket(self, text: str) -> None:
        if self._stack or not self._splits:
            self._emit(text)

    def _space(self, text: str) -> None:
        """Write white space between values, except around keyword arguments; what JSON does not allow as spaces."""
        if not self._stack or self._stack[-1].is_call or self._stack[-1].is_spread:
            return
        text = _OTHER_WHITE.sub(" ", text)
        if self._comma:
            self._gap.append(text)
        elif not self._splits or len(self._stack) > 1:
            self._emit(text)

    def _text(self, text: str) -> None:
        """Write a part of a text, as JSON."""
        if self._key is not None:
            self._key.append(text)
        else:
            self._emit(text)

    def _plain(self, text: str) -> None:
        self._text(as_json(text)[1:-1])

    def _begin_item(self) -> None:
        """Write the comma before an item of a list."""
        if self._stack and not self._stack[-1].is_object:
            self._separate(self._stack[-1])

    def _separate(self, container: Container) -> None:
        gap, self._gap, self._comma = "".join(self._gap), [], False
        if container.num_items and not self._has_members:
            self._emit(", " if container.is_call else f",{gap}")
        container.num_items += 1

    def _write_key(self, key: str) -> None:
        container = self._stack[-1]
        if container.is_spread:
            container = self._stack[-2]
        self._separate(container)
        if self._has_members:
            self.out.append(Member(json.loads(f'"{key}"')))
        else:
            self._emit(f'"{key}": ' if container.is_call else f'"{key}":')

    def _key_text(self) -> str:
        assert self._key is not None
        key = "".join(self._key)
        return key if self._key_is_quoted else as_json(key)[1:-1]

    def _next_position(self) -> str:
        number = self._num_positional
        self._num_positional += 1
        named = self._positions[number] if number < len(self._positions) else f"arg{number + 1}"
        return as_json(named)[1:-1]


def as_json(value: object) -> str:
    """Return a value as JSON text that can be sent: lone surrogates are replaced."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode()


def read_json(text: str) -> Any:
    """Return the value of JSON text; numbers beyond those that JSON can write again are None.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=lambda _: None)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
